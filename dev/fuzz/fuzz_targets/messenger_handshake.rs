//! Input: what a peer without the token could send to either end. The body with its assertions is in
//! `messenger/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_messenger::fuzzing::handshake(data));
