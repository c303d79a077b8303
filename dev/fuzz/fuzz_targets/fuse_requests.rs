//! Input: bytes that could be requests of the kernel to a file system. The body with its assertions is in
//! `fuse/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_fuse::fuzzing::requests(data));
