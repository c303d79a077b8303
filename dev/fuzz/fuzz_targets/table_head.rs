//! Input: the head of a table. The body with its assertions is in `table/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_table::fuzzing::head(data));
