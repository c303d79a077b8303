//! Input: an area of a volume, or the head, byte by byte. The body with its assertions is in `files/src/names/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_files::names::fuzzing::raw_area(data));
