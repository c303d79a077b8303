//! Input: a message's kind, the number of its blocks, and its front. The body with its assertions is in
//! `volume/src/wire/mod.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_volume::wire::fuzzing::message(data));
