# crossdock_layer(NAME [DEPENDS layer...] [LIBS lib...])
#   Declares the layer of the current folder: every *.cpp below it, compiled once into an object
#   library `crossdock_<NAME>`. `DEPENDS` names the layers whose headers it may include; the include
#   edges themselves are checked by cmake/check_layers.py against cmake/layers.txt.
function(crossdock_layer name)
  cmake_parse_arguments(ARG "" "" "DEPENDS;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp
       ${CMAKE_CURRENT_SOURCE_DIR}/*.S)
  if(NOT sources)
    return()
  endif()
  add_library(crossdock_${name} OBJECT ${sources})
  target_link_libraries(crossdock_${name} PUBLIC crossdock_options ${ARG_LIBS})
  set_property(GLOBAL APPEND PROPERTY CROSSDOCK_LAYERS ${name})
endfunction()

# crossdock_test(NAME LABELS label... [SOURCES file...] [TIMEOUT seconds] [LIBS lib...])
#   One GoogleTest executable and one ctest entry. Labels: unit contract multiproc twin fuzz gpu perf.
function(crossdock_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS;SOURCES;LIBS;ARGS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(CROSSDOCK_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 5")  # instrumented code is that much slower
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE crossdock_internal crossdock_options GTest::gmock_main
                        ${ARG_LIBS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  # What GCC 12 sees at -O3 in strings that are joined or assigned (GCC bugs 105651, 105562), and is not there.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${name} PRIVATE
                           $<$<CONFIG:Release>:-Wno-restrict> $<$<CONFIG:Release>:-Wno-maybe-uninitialized>)
  endif()
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
  if(CROSSDOCK_SANITIZE MATCHES "address")
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/support/asan_options.cpp)
  endif()
endfunction()

# crossdock_unit_tests(LAYER): every *_test.cpp below tests/unit/LAYER in one executable `unit_<LAYER>`.
function(crossdock_unit_tests layer)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/unit/${layer}/*_test.cpp)
  if(sources)
    crossdock_test(unit_${layer} LABELS unit SOURCES ${sources})
  endif()
endfunction()
