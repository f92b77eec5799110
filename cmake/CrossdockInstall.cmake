# Install rules: headers, both forms of the library, CMake package, pkg-config file, command. Nothing
# private leaks: a consumer needs only threads and dl.
include(CMakePackageConfigHelpers)

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/crossdock)

install(TARGETS crossdock_static crossdock_shared EXPORT crossdockTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(EXPORT crossdockTargets NAMESPACE crossdock:: DESTINATION ${_package_dir})
if(CROSSDOCK_BUILD_TOOLS)
  install(TARGETS crossdock_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  # What `crossdock demo pd` plays; it looks for it relative to itself.
  install(FILES ${PROJECT_SOURCE_DIR}/examples/data/conversation_excerpt.jsonl
          DESTINATION ${CMAKE_INSTALL_DATADIR}/crossdock)
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/crossdockConfig.cmake.in
  ${PROJECT_BINARY_DIR}/crossdockConfig.cmake INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/crossdockConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/crossdockConfig.cmake
              ${PROJECT_BINARY_DIR}/crossdockConfigVersion.cmake DESTINATION ${_package_dir})

# pkg-config files are relocatable: the prefix is found from where the file lies.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_LIBDIR BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX}
           OUTPUT_VARIABLE _libdir)
cmake_path(APPEND _libdir "pkgconfig" OUTPUT_VARIABLE _pc_dir)
string(REGEX REPLACE "[^/]+" ".." CROSSDOCK_PC_UP "${_pc_dir}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/crossdock.pc.in ${PROJECT_BINARY_DIR}/crossdock.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/crossdock.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
