//! Shared memory: memfds that this process or another writes, and read-only views of them. What the bytes mean is
//! decided in other crates.
//!
//! Several parties access the same bytes at the same time: threads of this process, other processes that have mapped
//! the memfd, and the kernel on behalf of a socket. Therefore shared bytes are **never behind a reference**: [`Memory`]
//! and [`View`] offer offsets, copies, and atomic loads and stores with an ordering. A copy that races with a writer
//! holds a mixture of old and new bytes. It is a `[u8]`, for which every mixture is a valid value; the layers above
//! detect the mixture by sequence numbers and checksums.
//!
//! What is true of every [`Memory`] and [`View`]:
//!
//! - It is one memfd, mapped `MAP_SHARED` as a whole, for as long as the value exists.
//! - It is sealed against shrinking. Reading beyond the end of a mapped file kills the process by SIGBUS.
//! - It is sealed against growing and against further seals, so that every process sees the same size.
//! - Each access is checked against the length, without overflow, before any byte is accessed.
//!
//! ```text
//!   Memory  (we write)  ──Deref──▶  View  (read-only)
//!      └────────────┬────────────────┘
//!                Mapping            pointer and length; returns…
//!                   └─▶ Span        …a checked range of it. All unsafe code is in mapping.rs
//! ```
//!
//! - [`Memory`] and [`View`]. **Start here.**
//! - [`crc`]: CRC-32C, of slices and of shared bytes.
//! - [`handover`]: passing memory to another process of this host for writing; [`local`]: the sockets for that,
//!   and memory that the service manager kept for this process.
//!
//! The first access to each 4 KiB page of each mapping costs microseconds, even if the page already exists.
//! [`Memory::prefault`] and [`View::populate`] pay this in advance.
//!
//! Readers get a descriptor that is open for reading only ([`View::reopen_read_only`]), and the file has mode `0444`
//! and no name: only a process that was given a descriptor can reopen it, and another user's process for reading only.
//! A process of the same user can change the mode and write, unless the memory has the seal `F_SEAL_FUTURE_WRITE`
//! ([`Memory::create_single_writer`]). That seal also forbids `FALLOC_FL_PUNCH_HOLE` to the owner (EPERM, tried on
//! Linux 6.18), which [`Memory::release`] needs, and a server's module cannot write such a memory. Mappings are not
//! part of core dumps.
//!
//! An [`Error`] says what can go wrong with shared memory and with handing it over, sorted by who can act on it.

#![deny(unsafe_code)]

pub mod crc;
pub mod handover;
pub mod local;
#[allow(unsafe_code)] // the only module that dereferences mapped addresses
mod mapping;
mod shared;

use std::io;
use std::time::Duration;

pub use handover::Handover;
pub use local::{Place, wait_readable};
pub use mapping::check;
pub use shared::{Claim, Memory, View};

/// The page size of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pages {
    /// The system's base pages.
    #[default]
    Small,
    /// Huge pages of 2 MiB. If the system has too few, base pages are used and a message is logged. Huge pages need
    /// fewer table entries in a network card. Copies by the processor did not become faster in measurements.
    Huge,
}

/// An error of shared memory, or of the local sockets that hand it over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // -- The caller: change the call. --
    /// A range that is not inside the memory.
    #[error("{length} bytes at offset {offset} are outside a memory of {size} bytes")]
    OutOfBounds {
        /// First byte of the range.
        offset: u64,
        /// Bytes in the range.
        length: u64,
        /// Bytes in the memory.
        size: u64,
    },
    /// An atomic access at an offset that is not a multiple of its size.
    #[error("offset {offset} is not a multiple of {align}, as atomic access requires")]
    Unaligned {
        /// The offset.
        offset: u64,
        /// The required alignment, in bytes.
        align: u64,
    },
    /// An invalid argument.
    #[error("{0}")]
    Misuse(&'static str),

    // -- The other process: check its address, or distrust it. --
    /// No process listens at the address.
    #[error("cannot reach {what}: {source}")]
    Unreachable {
        /// The address.
        what: String,
        /// What the system reports.
        source: io::Error,
    },
    /// The other process did not answer in time.
    #[error("{what} did not answer within {after:?}")]
    TimedOut {
        /// Which end did not answer.
        what: &'static str,
        /// The time limit.
        after: Duration,
    },
    /// The other process violated the protocol.
    #[error("the other end broke the protocol: {0}")]
    Protocol(&'static str),
    /// The memory received could shrink: an access beyond its new end would kill this process.
    #[error("the memory received cannot be mapped safely: {0}")]
    Unsealed(&'static str),

    // -- The system: its administrator can act. --
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What the call was for.
        what: &'static str,
        /// What the system reports.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: adds what the call was for to what the system reports.
    pub fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: source.into() }
    }
}

/// For calls that return `io::Result`: keeps the error as the source of the new one.
impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::System { source, .. } | Error::Unreachable { source, .. } => source.kind(),
            Error::TimedOut { .. } => io::ErrorKind::TimedOut,
            Error::Protocol(_) => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::InvalidInput,
        };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    //! Tests of memory: against a vector as the oracle, its bounds, its seals, and the system calls that use it
    //! directly.

    #![allow(clippy::unwrap_used)]

    use std::{
        fs::File,
        io::{Read, Write},
        os::{
            fd::{AsFd, OwnedFd},
            unix::net::UnixStream,
        },
        sync::atomic::Ordering,
    };

    use proptest::prelude::*;

    use super::*;
    use crate::Error;

    const SIZE: u64 = 64 << 10;

    fn memory() -> Memory {
        Memory::create("remora-test", SIZE, Pages::Small).unwrap()
    }

    fn contents(view: &View) -> Vec<u8> {
        let mut bytes = vec![0; view.length() as usize];
        view.read(0, &mut bytes).unwrap();
        bytes
    }

    /// An operation on a memory, and on a vector.
    #[derive(Clone, Debug)]
    enum Operation {
        Write { offset: u64, bytes: Vec<u8> },
        Fill { offset: u64, length: u64, byte: u8 },
        Store64 { offset: u64, value: u64 },
        Store32 { offset: u64, value: u32 },
        CopyWithin { from: u64, to: u64, length: u64 },
        Release { offset: u64, length: u64 },
        Prefault { offset: u64, length: u64 },
        Forget { offset: u64, length: u64 },
    }

    /// Mostly inside, sometimes beyond, sometimes far beyond.
    fn places() -> impl Strategy<Value = u64> {
        prop_oneof![8 => 0..SIZE, 1 => SIZE - 8..SIZE + 8, 1 => u64::MAX - 8..=u64::MAX]
    }

    fn lengths() -> impl Strategy<Value = u64> {
        prop_oneof![8 => 0..9000u64, 1 => Just(SIZE), 1 => u64::MAX - 8..=u64::MAX]
    }

    fn operations() -> impl Strategy<Value = Operation> {
        use Operation::*;
        prop_oneof![
            (places(), prop::collection::vec(any::<u8>(), 0..5000)).prop_map(|(offset, bytes)| Write { offset, bytes }),
            (places(), lengths(), any::<u8>()).prop_map(|(offset, length, byte)| Fill { offset, length, byte }),
            (places(), any::<u64>()).prop_map(|(offset, value)| Store64 { offset, value }),
            (places(), any::<u32>()).prop_map(|(offset, value)| Store32 { offset, value }),
            (places(), places(), lengths()).prop_map(|(from, to, length)| CopyWithin { from, to, length }),
            (places(), lengths()).prop_map(|(offset, length)| Release { offset, length }),
            (places(), lengths()).prop_map(|(offset, length)| Prefault { offset, length }),
            (places(), lengths()).prop_map(|(offset, length)| Forget { offset, length }),
        ]
    }

    impl Operation {
        fn on_memory(&self, memory: &Memory) -> Result<(), Error> {
            match *self {
                Operation::Write { offset, ref bytes } => memory.write(offset, bytes),
                Operation::Fill { offset, length, byte } => memory.fill(offset..offset.saturating_add(length), byte),
                Operation::Store64 { offset, value } => memory.store_u64(offset, value, Ordering::Release),
                Operation::Store32 { offset, value } => memory.store_u32(offset, value, Ordering::Relaxed),
                Operation::CopyWithin { from, to, length } => {
                    memory.copy_to(from..from.saturating_add(length), memory, to)
                }
                Operation::Release { offset, length } => memory.release(offset..offset.saturating_add(length)),
                Operation::Prefault { offset, length } => memory.prefault(offset..offset.saturating_add(length)),
                Operation::Forget { offset, length } => {
                    memory.forget(offset..offset.saturating_add(length));
                    Ok(())
                }
            }
        }

        /// The oracle. `None` means that the operation must fail and change nothing.
        fn on_vector(&self, bytes: &mut [u8]) -> Option<()> {
            let range = |offset: u64, length: u64| {
                let end = usize::try_from(offset.checked_add(length)?).ok()?;
                (end as u64 <= SIZE).then_some(offset as usize..end)
            };
            match *self {
                Operation::Write { offset, bytes: ref new } => {
                    bytes[range(offset, new.len() as u64)?].copy_from_slice(new);
                }
                Operation::Fill { offset, length, byte } => bytes[range(offset, length)?].fill(byte),
                Operation::Store64 { offset, value } if offset % 8 == 0 => {
                    bytes[range(offset, 8)?].copy_from_slice(&value.to_ne_bytes());
                }
                Operation::Store32 { offset, value } if offset % 4 == 0 => {
                    bytes[range(offset, 4)?].copy_from_slice(&value.to_ne_bytes());
                }
                Operation::Store64 { .. } | Operation::Store32 { .. } => return None,
                Operation::CopyWithin { from, to, length } => {
                    range(to, length)?;
                    bytes.copy_within(range(from, length)?, to as usize);
                }
                Operation::Release { offset, length } => bytes[range(offset, length)?].fill(0),
                Operation::Prefault { offset, length } => {
                    range(offset, length)?;
                }
                Operation::Forget { .. } => {}
            }
            Some(())
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_memory_behaves_as_a_vector_does(operations in prop::collection::vec(operations(), 1..40)) {
            let memory = memory();
            let window = memory.open_view().unwrap();
            let mut truth = vec![0; SIZE as usize];
            for operation in &operations {
                let done = operation.on_memory(&memory).is_ok();
                prop_assert_eq!(done, operation.on_vector(&mut truth).is_some(), "{:?}", operation);
            }
            prop_assert!(contents(&memory) == truth, "through the writer's mapping");
            prop_assert!(contents(&window) == truth, "through a reader's mapping");
        }

        #[test]
        fn the_checksum_of_shared_bytes_is_the_checksum_of_the_bytes(start in 0..SIZE, length in 0..SIZE, cut in 0..SIZE) {
            let memory = memory();
            let bytes: Vec<u8> = (0..SIZE).map(|at| (at * 31 % 251) as u8).collect();
            memory.write(0, &bytes).unwrap();
            let (end, cut) = ((start + length).min(SIZE), start + cut % (length + 1));
            let cut = cut.min(end);
            let truth = crate::crc::crc32c(&bytes[start as usize..end as usize]);
            prop_assert_eq!(memory.crc32c(start..end).unwrap(), truth);
            let first = memory.crc32c(start..cut).unwrap();
            prop_assert_eq!(memory.crc32c_append(first, cut..end).unwrap(), truth, "in two pieces");
        }
    }

    #[test]
    fn an_error_of_bounds_names_all_three_numbers() {
        let error = memory().write(SIZE - 1, b"ab").unwrap_err();
        assert_eq!(error.to_string(), "2 bytes at offset 65535 are outside a memory of 65536 bytes");
    }

    #[test]
    fn a_range_that_runs_backward_lies_nowhere() {
        #[allow(clippy::reversed_empty_ranges)]
        let backward = 10..5;
        assert!(matches!(memory().crc32c(backward.clone()), Err(Error::OutOfBounds { .. })));
        assert!(memory().fill(backward.clone(), 1).is_err());
        memory().populate(backward);
    }

    #[test]
    fn a_memory_of_nothing_or_of_everything_is_refused() {
        assert!(Memory::create("remora-test", 0, Pages::Small).is_err());
        assert!(Memory::create("remora-test", u64::MAX, Pages::Small).is_err());
        assert!(Memory::create("remora-test", u64::MAX, Pages::Huge).is_err());
    }

    #[test]
    fn huge_pages_or_the_ordinary_ones_in_their_place_hold_the_same() {
        let memory = Memory::create("remora-test", 3 << 20, Pages::Huge).unwrap();
        assert_eq!(memory.length(), 3 << 20);
        memory.write((3 << 20) - 3, b"end").unwrap();
        let mut end = [0; 3];
        memory.open_view().unwrap().read((3 << 20) - 3, &mut end).unwrap();
        assert_eq!(&end, b"end");
        memory.release(0..3 << 20).unwrap();
        assert_eq!(memory.crc32c(0..3 << 20).unwrap(), crate::crc::crc32c(&vec![0; 3 << 20]));
    }

    #[test]
    fn what_is_touched_counts_and_what_is_released_does_not() {
        let memory = memory();
        assert_eq!(memory.resident().unwrap(), 0);
        memory.prefault(0..SIZE).unwrap();
        assert_eq!(memory.resident().unwrap(), SIZE);
        memory.release(0..SIZE / 2).unwrap();
        assert_eq!(memory.resident().unwrap(), SIZE / 2);
        // Released pages are backed again on demand.
        memory.prefault(0..SIZE / 4).unwrap();
        assert_eq!(memory.resident().unwrap(), SIZE / 4 * 3);
        memory.prefault(0..SIZE).unwrap();
        assert_eq!(memory.resident().unwrap(), SIZE);
    }

    #[test]
    fn touching_by_hand_backs_pages_and_leaves_the_content() {
        let memory = memory();
        memory.write(4096, b"kept").unwrap();
        memory.mapping().span_mut(0, SIZE).unwrap().touch();
        assert_eq!(memory.resident().unwrap(), SIZE);
        let mut kept = [0; 4];
        memory.read(4096, &mut kept).unwrap();
        assert_eq!(&kept, b"kept");
    }

    #[test]
    fn loads_and_stores_are_checked_for_place_alignment_and_order() {
        let memory = memory();
        memory.store_u64(8, 0x0102_0304_0506_0708, Ordering::Release).unwrap();
        assert_eq!(memory.load_u64(8, Ordering::Acquire).unwrap(), 0x0102_0304_0506_0708);
        memory.store_u32(12, 7, Ordering::SeqCst).unwrap();
        assert_eq!(memory.load_u32(12, Ordering::Relaxed).unwrap(), 7);
        assert!(matches!(memory.load_u64(4, Ordering::Acquire), Err(Error::Unaligned { offset: 4, align: 8 })));
        assert!(matches!(memory.load_u32(2, Ordering::Acquire), Err(Error::Unaligned { offset: 2, align: 4 })));
        assert!(matches!(memory.load_u64(SIZE, Ordering::Acquire), Err(Error::OutOfBounds { .. })));
        assert!(matches!(memory.load_u64(SIZE - 4, Ordering::Acquire), Err(Error::OutOfBounds { .. })));
        assert!(matches!(memory.load_u64(0, Ordering::Release), Err(Error::Misuse(_))));
        assert!(matches!(memory.store_u32(0, 1, Ordering::Acquire), Err(Error::Misuse(_))));
    }

    #[test]
    fn a_socket_fills_a_memory_and_a_memory_fills_a_socket() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let memory = memory();
        near.write_all(b"straight in").unwrap();
        assert_eq!(memory.receive(&far, 100, 4096).unwrap(), 11);
        assert_eq!(memory.send(&far, 109, 2).unwrap(), 2);
        assert_eq!(memory.send_file(&far, 100, 8).unwrap(), 8);
        let mut back = [0; 10];
        near.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"instraight");
        drop(near);
        assert_eq!(memory.receive(&far, 0, 1).unwrap(), 0, "the end of the stream");
        assert_eq!(memory.receive(&far, 0, 0).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_send_to_a_closed_socket_is_an_error_and_raises_no_signal() {
        let (near, far) = UnixStream::pair().unwrap();
        drop(far);
        assert_eq!(memory().send(&near, 0, 1).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_file_fills_a_memory_and_a_memory_fills_a_file() {
        let file = File::from(rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let memory = memory();
        memory.write(0, b"spooled").unwrap();
        assert_eq!(memory.write_at(&file, 10, 0, 7).unwrap(), 7);
        assert_eq!(memory.read_at(&file, 13, 200, 100).unwrap(), 4);
        let mut back = [0; 4];
        memory.read(200, &mut back).unwrap();
        assert_eq!(&back, b"oled");
        assert_eq!(memory.read_at(&file, 17, 0, 1).unwrap(), 0, "the end of the file");
    }

    #[test]
    fn the_system_calls_too_are_kept_inside_the_memory() {
        let (near, far) = UnixStream::pair().unwrap();
        let memory = memory();
        assert!(memory.receive(&far, SIZE, 1).is_err());
        assert!(memory.receive(&far, u64::MAX, 2).is_err());
        assert!(memory.read_at(&far, 0, SIZE - 1, 2).is_err());
        assert!(memory.send(&near, SIZE - 1, 2).is_err());
        assert!(memory.send_file(&near, u64::MAX, 2).is_err());
        assert!(memory.write_at(&near, 0, 1, SIZE as usize).is_err());
    }

    #[test]
    fn only_memory_that_can_not_shrink_is_mapped() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let loose = rustix::fs::memfd_create("loose", flags).unwrap();
        rustix::fs::ftruncate(&loose, SIZE).unwrap();
        assert!(matches!(View::open(loose, SIZE), Err(Error::Unsealed(_))));
        let plain = OwnedFd::from(File::open("/proc/self/exe").unwrap());
        assert!(matches!(View::open(plain, 1), Err(Error::Unsealed(_))));
        let short = memory().reopen_read_only().unwrap();
        assert!(matches!(View::open(short, SIZE + 1), Err(Error::Unsealed(_))));
    }

    #[test]
    fn memory_handed_over_for_writing_is_written_by_both() {
        let memory = memory();
        let adopted = Memory::adopt(memory.as_fd().try_clone_to_owned().unwrap(), SIZE).unwrap();
        adopted.write(10, b"theirs").unwrap();
        memory.write(16, b" ours").unwrap();
        let mut both = [0; 11];
        adopted.read(10, &mut both).unwrap();
        assert_eq!(&both, b"theirs ours");
        assert!(matches!(Memory::adopt(memory.reopen_read_only().unwrap(), SIZE), Err(Error::System { .. })));
        let short = memory.as_fd().try_clone_to_owned().unwrap();
        assert!(matches!(Memory::adopt(short, SIZE + 1), Err(Error::Unsealed(_))));
    }

    #[test]
    fn a_memory_has_one_claim_at_a_time() {
        let memory = memory();
        let theirs = Memory::adopt(memory.as_fd().try_clone_to_owned().unwrap(), SIZE).unwrap();
        let claim = memory.claim().unwrap();
        assert!(claim.is_some() && theirs.claim().unwrap().is_none() && memory.claim().unwrap().is_none());
        drop(claim);
        assert!(theirs.claim().unwrap().is_some());
    }

    #[test]
    fn the_size_of_a_memory_is_fixed_for_everyone() {
        let memory = memory();
        assert!(rustix::fs::ftruncate(memory.as_fd(), SIZE / 2).is_err());
        assert!(rustix::fs::ftruncate(memory.as_fd(), SIZE * 2).is_err());
    }

    #[test]
    fn a_descriptor_for_reading_gives_no_way_to_write() {
        let memory = memory();
        let read_only = memory.reopen_read_only().unwrap();
        assert!(rustix::io::write(&read_only, b"x").is_err());
        assert!(
            super::mapping::Mapping::new(&mapping::Sealed::check(read_only.as_fd(), SIZE).unwrap(), true).is_err(),
            "not mapped writable"
        );
        let window = View::open(read_only, SIZE).unwrap();
        assert!(window.mapping().span_mut(0, 1).is_err());
        let mode = rustix::fs::fstat(window.as_fd()).unwrap().st_mode & 0o777;
        assert_eq!(mode, 0o444, "no other process can reopen it for writing");
    }

    #[test]
    fn a_single_writer_memory_is_written_by_no_other_mapping() {
        use rustix::fs::{Mode, OFlags};
        let memory = Memory::create_single_writer("single", 4096, Pages::Small).unwrap();
        memory.write(0, b"ours").unwrap();
        let reader = memory.reopen_read_only().unwrap();
        // A process of the same user can change the mode and open the memory for writing.
        rustix::fs::fchmod(&reader, Mode::RUSR | Mode::WUSR).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        let writer = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert_eq!(rustix::io::pwrite(&writer, b"theirs", 0), Err(rustix::io::Errno::PERM));
        assert!(matches!(Memory::adopt(writer, 4096), Err(Error::System { .. })));
        memory.write(0, b"still").unwrap();
        memory.prefault(0..4096).unwrap();
        let mut bytes = [0; 5];
        memory.open_view().unwrap().read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"still");
    }

    #[test]
    fn mappings_are_not_part_of_core_dumps() {
        let memory = Memory::create("remora-no-dump", 4096, Pages::Small).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let address = format!("{:x}-", memory.base_address().as_ptr() as usize);
        let ours = maps.lines().skip_while(|line| !line.starts_with(&address));
        let flags = ours.into_iter().find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }
}
