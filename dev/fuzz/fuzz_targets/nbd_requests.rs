//! Input: bytes that could be the requests of an NBD client. The body with its assertions is in `nbd/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_nbd::fuzzing::requests(data));
