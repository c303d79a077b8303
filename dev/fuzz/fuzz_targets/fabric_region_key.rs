//! Input: a region key that a peer sent. The body with its assertions is in `fabric/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_fabric::fuzzing::region_key(data));
