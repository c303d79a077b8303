//! Input: how many bytes a slot has, and what is stored of it. The body with its assertions is in `table/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_table::fuzzing::decode(data));
