# Compiler settings shared by every target of the project: standard, warnings, sanitizers.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_package(Threads REQUIRED)

find_program(CROSSDOCK_CCACHE ccache)
if(CROSSDOCK_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CROSSDOCK_CCACHE})
endif()
find_program(CROSSDOCK_MOLD mold)
if(CROSSDOCK_MOLD AND PROJECT_IS_TOP_LEVEL)
  add_link_options(-fuse-ld=mold)
endif()

# An interface target that every private target links: warnings, sanitizers, include roots.
add_library(crossdock_options INTERFACE)
target_include_directories(crossdock_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/device>)
target_link_libraries(crossdock_options INTERFACE Threads::Threads)
# fmt and xxHash are compiled into our objects, so that whoever links the library needs neither.
target_compile_definitions(crossdock_options INTERFACE FMT_HEADER_ONLY=1 XXH_INLINE_ALL=1)
target_compile_options(crossdock_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor
  -Woverloaded-virtual -Wimplicit-fallthrough -fno-omit-frame-pointer
  $<$<BOOL:${CROSSDOCK_WERROR}>:-Werror>)

# GCC 12 sees overflows that are not there when it inlines vector::insert at -O3 (GCC bug 105329).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(crossdock_options INTERFACE -Wno-stringop-overflow)
endif()

if(CROSSDOCK_SANITIZE)
  string(REPLACE "," ";" _sanitizers "${CROSSDOCK_SANITIZE}")
  foreach(_s IN LISTS _sanitizers)
    target_compile_options(crossdock_options INTERFACE -fsanitize=${_s})
    target_link_options(crossdock_options INTERFACE -fsanitize=${_s})
    if(_s STREQUAL "undefined")
      target_compile_options(crossdock_options INTERFACE -fno-sanitize-recover=undefined)
    endif()
    string(TOUPPER ${_s} _upper)
    target_compile_definitions(crossdock_options INTERFACE CROSSDOCK_SANITIZE_${_upper}=1)
  endforeach()
  # GCC reports false positives of these two under instrumentation; plain builds keep them.
  target_compile_options(crossdock_options INTERFACE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
endif()
if(CROSSDOCK_BUILD_FUZZ)
  # Coverage feedback for libFuzzer in the code under test; its main() comes with the targets only.
  target_compile_options(crossdock_options INTERFACE -fsanitize=fuzzer-no-link)
endif()
