//! Input: an area of a volume, or the head, byte by byte. The body with its assertions is in `volume/src/names/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_volume::names::fuzzing::raw_area(data));
