//! Input: words of progress lines and directory entries. The body with its assertions is in `table/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_table::fuzzing::entries(data));
