//! Input: records of an image and of a log, as they could be in a volume. The body with its assertions is in `files/src/names/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_files::names::fuzzing::area(data));
