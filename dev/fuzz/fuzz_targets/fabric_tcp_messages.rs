//! Input: requests or answers of a TCP data lane. The body with its assertions is in `fabric/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_fabric::fuzzing::tcp_messages(data));
