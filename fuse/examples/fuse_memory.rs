//! A file system in memory at the given directory, until its standard input ends or it is unmounted.
//!
//! `cargo run --release -p remora-fuse --example fuse_memory -- DIRECTORY [device|ring] [write-back]`

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::{Session, SessionOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let directory = arguments.next().map(PathBuf::from).ok_or("which directory?")?;
    let words: Vec<String> = arguments.map(|word| word.to_string_lossy().into_owned()).collect();
    let has = |wanted: &str| words.iter().any(|word| word == wanted);
    let options = SessionOptions {
        ring: !has("device"),
        write_back: has("write-back"),
        lists_attributes: true,
        ..SessionOptions::default()
    };
    let file_system = Arc::new(MemoryFileSystem::new(Duration::from_secs(60)));
    let session = Session::start(&directory, file_system, &options)?;
    println!("{:?} at {}", session.transport(), session.directory().display());
    let ends = Arc::new(AtomicBool::new(false));
    let input = Arc::clone(&ends);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        input.store(true, Ordering::Relaxed);
    });
    while !session.wait(LOOK_AGAIN) && !ends.load(Ordering::Relaxed) {}
    Ok(session.end()?)
}

/// How often it is looked whether the input has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
