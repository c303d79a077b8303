//! Input: a sealed table's progress line, entries and bytes; its first byte selects the reader. The body with its assertions
//! is in `table/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_table::fuzzing::sealed_readers(data));
