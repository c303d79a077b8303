//! The memory of a running server, and where its state is in it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use object::{Object, ObjectSegment, ObjectSymbol};
use remora_bench::sync::Result;
use sha2::{Digest, Sha256};

/// The memory of a process that belongs to us.
pub(super) struct Memory {
    file: File,
    program: Vec<u8>,
    /// Where the variable `server` is, and its size.
    state: u64,
    state_bytes: usize,
}

impl Memory {
    /// # Errors
    /// The program does not show its variable `server`, or its memory cannot be read.
    pub(super) fn of(pid: u32) -> Result<Memory> {
        // Also where the program was started by a script: this is what runs.
        let program = fs::read(format!("/proc/{pid}/exe"))?;
        let parsed = object::File::parse(&*program)?;
        let state = parsed.dynamic_symbols().find(|symbol| symbol.name() == Ok("server"));
        let state = state.ok_or("the program does not show its variable `server`: it was linked without -rdynamic")?;
        let linked_at = parsed.segments().find(|segment| segment.file_range().0 == 0).map(|segment| segment.address());
        let linked_at = linked_at.ok_or("the program has no segment at its beginning")?;
        let path = fs::read_link(format!("/proc/{pid}/exe"))?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let loaded_at = maps.lines().filter(|line| line.ends_with(&*path.to_string_lossy())).find_map(|line| {
            let mut words = line.split_whitespace();
            let (range, offset) = (words.next()?, words.nth(1)?);
            let zero = u64::from_str_radix(offset, 16) == Ok(0);
            zero.then(|| u64::from_str_radix(range.split('-').next()?, 16).ok()).flatten()
        });
        let loaded_at = loaded_at.ok_or_else(|| format!("process {pid} does not have its program in its memory"))?;
        let (address, bytes) = (state.address() - linked_at + loaded_at, state.size() as usize);
        let file = File::open(format!("/proc/{pid}/mem"))?;
        Ok(Memory { file, state: address, state_bytes: bytes, program })
    }

    /// The address of the server's state.
    pub(super) fn state(&self) -> u64 {
        self.state
    }

    /// The size of the server's state.
    pub(super) fn state_bytes(&self) -> usize {
        self.state_bytes
    }

    /// The SHA-256 of the program, hexadecimal.
    pub(super) fn sha256(&self) -> String {
        Sha256::digest(&self.program).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The family of the build, by the functions that it shows.
    ///
    /// # Errors
    /// The functions are those of no family that the module knows.
    pub(super) fn family(&self) -> Result<&'static str> {
        let parsed = object::File::parse(&*self.program)?;
        let shown: Vec<&str> = parsed.dynamic_symbols().filter_map(|symbol| symbol.name().ok()).collect();
        let shows = |name: &str| shown.contains(&name);
        if shows("kvstoreGetHashtable") && shows("objectGetVal") {
            Ok("valkey-9")
        } else if shows("kvstoreGetHashtable") {
            Ok("valkey-8.1")
        } else if shows("dictGenHashFunction") && !shows("kvstoreCreate") {
            Ok("redis-7")
        } else if shows("dictGenHashFunction") && shows("dictSdsEmbedKey") {
            Ok("valkey-8.0")
        } else if shows("dictGenHashFunction") && !shows("kvobjGetKey") {
            Ok("redis-8.0")
        } else {
            Err("the module has no code for this server's tables; its families are redis-7, redis-8.0, valkey-8.0, \
                 valkey-8.1 and valkey-9"
                .into())
        }
    }

    /// The bytes at an address; fewer if fewer can be read.
    pub(super) fn bytes(&self, address: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let read = self.file.read_at(&mut bytes, address).unwrap_or(0);
        bytes.truncate(read);
        bytes
    }

    /// The words at an address; fewer if fewer can be read.
    pub(super) fn words(&self, address: u64, count: usize) -> Vec<u64> {
        let bytes = self.bytes(address, count * size_of::<u64>());
        bytes
            .chunks_exact(size_of::<u64>())
            .map(|word| word.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
            .collect()
    }

    /// The word at an address.
    pub(super) fn word(&self, address: u64) -> Option<u64> {
        self.words(address, 1).first().copied()
    }
}
