# The dispatch on a fake network.
add_library(dispatch_fixture STATIC router/dispatch_fixture.c)
target_include_directories(dispatch_fixture PUBLIC router)
pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
target_link_libraries(dispatch_fixture PUBLIC bt_dispatch PkgConfig::CMOCKA)
foreach(name test_dispatch test_dispatch_abort test_dispatch_hello test_dispatch_queue test_dispatch_prompt test_dispatch_random test_dispatch_samples test_dispatch_stream
    test_dispatch_masks test_dispatch_restart test_row_assembler)
  bt_test(NAME ${name} LABEL unit SOURCES router/${name}.c LINKS dispatch_fixture)
endforeach()
