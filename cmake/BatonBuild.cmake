# Compiler settings shared by every target, and the helpers that declare libraries, programs and tests.

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()
if(NOT BT_KERNELS_ONLY)
  find_package(PkgConfig REQUIRED)
endif()
find_package(Threads REQUIRED)

add_library(bt_warnings INTERFACE)
target_compile_definitions(bt_warnings INTERFACE _GNU_SOURCE)
target_include_directories(bt_warnings INTERFACE ${CMAKE_SOURCE_DIR})
# Rule 4 (prefix-determinism): the compiler may not contract a*b+c on its own. That nobody traps or
# reads errno changes no value, and lets loops over kernels/math.h vectorise.
target_compile_options(bt_warnings INTERFACE
  -ffp-contract=off -fno-trapping-math -fno-math-errno -fno-strict-aliasing -fno-omit-frame-pointer
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wstrict-prototypes
  -Wmissing-prototypes -Wvla -Wundef -Wcast-qual -Wwrite-strings -Wformat=2 -Wimplicit-fallthrough)
if(BT_WERROR)
  target_compile_options(bt_warnings INTERFACE -Werror)
endif()
if(BT_FAULT)
  target_compile_definitions(bt_warnings INTERFACE BT_FAULT=1)
endif()
if(BT_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all)
  add_link_options(-fsanitize=address,undefined)
elseif(BT_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
endif()
if(BT_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link) # coverage for the targets in tests/fuzz
endif()

# bt_library(NAME name SOURCES ... LINKS ...): a static library with the project's warnings.
function(bt_library)
  cmake_parse_arguments(A "" "NAME" "SOURCES;LINKS" ${ARGN})
  add_library(${A_NAME} STATIC ${A_SOURCES})
  target_link_libraries(${A_NAME} PUBLIC bt_warnings ${A_LINKS})
endfunction()

# bt_program(NAME name SOURCES ... LINKS ...): one of the binaries in build/bin.
function(bt_program)
  cmake_parse_arguments(A "" "NAME" "SOURCES;LINKS" ${ARGN})
  add_executable(${A_NAME} ${A_SOURCES})
  target_link_libraries(${A_NAME} PRIVATE bt_warnings ${A_LINKS})
endfunction()

# bt_test(NAME name LABEL label SOURCES ... LINKS ... ARGS ...): one cmocka program and its CTest entry.
# Exit status 77 means skipped. The program runs in the source folder, so that fixtures are found.
function(bt_test)
  cmake_parse_arguments(A "" "NAME;LABEL;TIMEOUT" "SOURCES;LINKS;ARGS" ${ARGN})
  pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
  add_executable(${A_NAME} ${A_SOURCES})
  target_link_libraries(${A_NAME} PRIVATE bt_warnings PkgConfig::CMOCKA ${A_LINKS})
  set_target_properties(${A_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${A_NAME} COMMAND ${A_NAME} ${A_ARGS} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 120)
  endif()
  set_tests_properties(${A_NAME} PROPERTIES LABELS "${A_LABEL}" SKIP_RETURN_CODE 77
    TIMEOUT ${A_TIMEOUT})
endfunction()
