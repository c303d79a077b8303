//! Input: the progress line, entries and bytes of a table whose slots may be compressed; its first byte selects the reader.
//! The body with its assertions is in `table/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_table::fuzzing::compressed_readers(data));
