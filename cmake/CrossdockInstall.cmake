# Install rules: headers, library, CMake package, pkg-config file, command.
