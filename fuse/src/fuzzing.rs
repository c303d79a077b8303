//! The body of the fuzz target, which `cargo test` runs on every seed: any bytes must end in an answer or an error,
//! never in a panic.

use rustix::io::Errno;

use crate::abi::{DIRENT_BYTES, ENTRY_BYTES, IN_HEADER_BYTES, InHeader, op};
use crate::answer::{
    Answer, Asked, Attributes, Created, Data, DirectoryEntry, Done, Entry, FileKind, KnownAttributes, LaterReplier,
    Listing, ListingPlus, Opened, Payload, Position, Replier, Sink, SinkPlace, Statistics, Target, Timestamp, Written,
    XATTR_LENGTH_BYTES, Xattr,
};
use crate::file_system::{self, FileSystem};
use crate::request::{
    Allocate, Close, Create, CreateUnnamed, Fsync, GetAttributes, GetXattr, Link, ListXattrs, Lookup, MOST_NAME_BYTES,
    MOST_TARGET_BYTES, MOST_VALUE_BYTES, MakeDirectory, MakeNode, Open, Read, ReadDirectory, Remove, RemoveXattr,
    Rename, Request, Seek, SetAttributes, SetXattr, Symlink, Write, is_of_xattrs, operation_bytes, parse,
};

/// The body of a target.
pub type Body = fn(&[u8]);

/// The targets by name.
pub const TARGETS: [(&str, Body); 1] = [("fuse_requests", requests)];

/// Reads requests, one after the other. The device's and the ring's way to lay them out mean the same. What a file
/// system is asked is inside the bounds that it is promised, and each request has one answer of the right length, at
/// once or later.
pub fn requests(mut input: &[u8]) {
    while let Some(header) = InHeader::decode(input) {
        assert_eq!(header.encode()[..38], input[..38], "two encodings of {header:?}");
        let length = (header.length as usize).clamp(IN_HEADER_BYTES, input.len());
        let (bytes, rest) = input.split_at(length);
        one(&header, &bytes[IN_HEADER_BYTES..]);
        input = rest;
    }
}

fn one(header: &InHeader, body: &[u8]) {
    let (operation, payload) = body.split_at(operation_bytes(header.opcode).min(body.len()));
    let parsed = parse(header, operation, payload);
    // The ring has room for 128 bytes, of which those behind the fields are left from earlier.
    let mut slot = [0xa5; RING_OPERATION_BYTES];
    slot[..operation.len()].copy_from_slice(operation);
    if operation.len() == operation_bytes(header.opcode) {
        assert_eq!(parse(header, &slot, payload), parsed);
    }
    let has_answer = !matches!(parsed, Ok(Request::Forget(_) | Request::Interrupt(_)));
    for is_late in [false, true] {
        let mut count = Count { answers: 0, opcode: header.opcode, error: None };
        let file_system = Checker { is_late };
        match parsed.clone() {
            Ok(Request::Write(fields)) => {
                let data = Payload::borrowed(&payload[..fields.size as usize]);
                file_system::write(&file_system, header, fields, data, &mut count);
            }
            parsed => file_system::request(&file_system, header, parsed, &mut count),
        }
        assert_eq!(count.answers, usize::from(has_answer || parsed.is_err()), "answers to {parsed:?}");
        // The caller may have too little room for an extended attribute.
        let expected = parsed.as_ref().err().copied();
        assert!(count.error == expected || (count.error == Some(Errno::RANGE) && is_of_xattrs(header.opcode)));
    }
}

/// Bytes of the ring's slot for an operation's fields.
const RING_OPERATION_BYTES: usize = 128;

/// Counts answers, and checks their lengths.
struct Count {
    answers: usize,
    opcode: u32,
    error: Option<Errno>,
}

impl Count {
    fn check(&self, length: usize) {
        let right = match self.opcode {
            op::LOOKUP | op::SYMLINK | op::MKNOD | op::MKDIR | op::LINK => ENTRY_BYTES,
            op::GETATTR | op::SETATTR => 104,
            op::OPEN | op::OPENDIR => 16,
            op::CREATE | op::TMPFILE => ENTRY_BYTES + 16,
            op::WRITE | op::LSEEK => 8,
            op::STATFS => 80,
            op::READ | op::READLINK => 3,
            op::GETXATTR | op::LISTXATTR if length != VALUE.len() => XATTR_LENGTH_BYTES,
            op::GETXATTR | op::LISTXATTR => VALUE.len(),
            op::READDIR | op::READDIRPLUS => length.next_multiple_of(8),
            _ => 0,
        };
        let is_less = self.opcode == op::READ && length < right; // less was asked for
        assert!(length == right || is_less, "an answer to {} of {length} bytes", self.opcode);
    }
}

impl Replier for Count {
    fn reply(&mut self, _: u64, answer: Result<&[&[u8]], Errno>) {
        self.answers += 1;
        match answer {
            Ok(pieces) => self.check(pieces.iter().map(|piece| piece.len()).sum()),
            Err(errno) => self.error = Some(errno),
        }
    }

    fn fill(&mut self, asked: Asked, fill: &mut dyn FnMut(&mut Sink<'_>)) {
        let most = asked.most.min(8);
        let mut bytes = vec![0; most];
        let mut sink = Sink::new(SinkPlace::Slice(&mut bytes), most);
        fill(&mut sink);
        let length = sink.finish().expect("the checker puts no more than it is asked for");
        self.reply(asked.unique, Ok(&[&bytes[..length]]));
    }

    fn later(&mut self) -> Box<dyn LaterReplier> {
        // Its answer is not seen here.
        self.answers += 1;
        Box::new(Unseen(Count { answers: 0, opcode: self.opcode, error: None }))
    }
}

struct Unseen(Count);

impl LaterReplier for Unseen {
    fn reply(mut self: Box<Self>, unique: u64, answer: Result<&[&[u8]], Errno>) {
        self.0.reply(unique, answer);
        assert!(self.0.error.is_none_or(|errno| errno == Errno::RANGE && is_of_xattrs(self.0.opcode)));
    }
}

/// Has everything, and checks what it is asked.
struct Checker {
    is_late: bool,
}

impl Checker {
    fn say(&self, answer: Answer<'_, Xattr>, size: u32) {
        match Xattr::of(VALUE, size) {
            Ok(xattr) => self.give(answer, xattr),
            Err(errno) => answer.fail(errno),
        }
    }

    fn give<R: crate::answer::Reply>(&self, answer: Answer<'_, R>, reply: R) {
        if self.is_late { answer.later().give(reply) } else { answer.give(reply) }
    }
}

fn xattr_name(name: &[u8]) {
    assert!((1..=MOST_NAME_BYTES).contains(&name.len()) && !name.contains(&0), "a name {name:?}");
}

/// The value of each extended attribute.
const VALUE: &[u8] = b"value";

fn name(name: &[u8]) {
    assert!((1..=MOST_NAME_BYTES).contains(&name.len()), "a name of {} bytes", name.len());
    assert!(!name.contains(&0) && !name.contains(&b'/') && name != b"." && name != b"..", "a name {name:?}");
}

fn range(offset: u64, length: u64) {
    assert!(offset.checked_add(length).is_some_and(|end| i64::try_from(end).is_ok()), "{offset} and {length} bytes");
}

fn attributes() -> Attributes {
    let at = Timestamp { seconds: -1, nanoseconds: 999_999_999 };
    let (size, blocks, block_bytes, device) = (u64::MAX, u64::MAX, 4096, 7);
    let (accessed, modified, changed) = (at, at, at);
    let kind = FileKind::File;
    let (node, permissions, links, uid, gid) = (2, 0o644, 1, 3, 4);
    Attributes {
        node,
        kind,
        permissions,
        links,
        uid,
        gid,
        size,
        blocks,
        block_bytes,
        device,
        accessed,
        modified,
        changed,
    }
}

fn entry() -> Entry {
    let valid = std::time::Duration::new(1, 2);
    Entry { attributes: Some(attributes()), generation: 1, name_valid: valid, attributes_valid: valid }
}

fn known() -> KnownAttributes {
    KnownAttributes { attributes: attributes(), valid: std::time::Duration::new(1, 2) }
}

const ENTRY: DirectoryEntry<'static> = DirectoryEntry { node: 5, kind: FileKind::File, name: b"name", offset: 9 };

impl FileSystem for Checker {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        name(asked.name);
        self.give(answer, entry());
    }

    fn get_attributes(&self, _: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        self.give(answer, known());
    }

    fn set_attributes(&self, asked: SetAttributes, answer: Answer<'_, KnownAttributes>) {
        range(asked.size.unwrap_or(0), 0);
        assert!(asked.permissions.unwrap_or(0) <= 0o7777);
        self.give(answer, known());
    }

    fn read_link(&self, _: u64, answer: Answer<'_, Target>) {
        self.give(answer, Target(b"abc"[..].into()));
    }

    fn symlink(&self, asked: Symlink<'_>, answer: Answer<'_, Entry>) {
        name(asked.name);
        assert!((1..MOST_TARGET_BYTES).contains(&asked.target.len()) && !asked.target.contains(&0));
        self.give(answer, entry());
    }

    fn make_node(&self, asked: MakeNode<'_>, answer: Answer<'_, Entry>) {
        name(asked.name);
        assert!(asked.permissions <= 0o7777);
        self.give(answer, entry());
    }

    fn make_directory(&self, asked: MakeDirectory<'_>, answer: Answer<'_, Entry>) {
        name(asked.name);
        self.give(answer, Entry::absent(std::time::Duration::ZERO));
    }

    fn unlink(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        name(asked.name);
        self.give(answer, Done);
    }

    fn remove_directory(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        name(asked.name);
        self.give(answer, Done);
    }

    fn rename(&self, asked: Rename<'_>, answer: Answer<'_, Done>) {
        name(asked.name);
        name(asked.new_name);
        self.give(answer, Done);
    }

    fn link(&self, asked: Link<'_>, answer: Answer<'_, Entry>) {
        name(asked.name);
        self.give(answer, entry());
    }

    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        name(asked.name);
        self.give(answer, Created { entry: entry(), opened: Opened::default() });
    }

    fn create_unnamed(&self, asked: CreateUnnamed, answer: Answer<'_, Created>) {
        assert!(asked.permissions <= 0o7777 && asked.umask <= 0o7777);
        self.give(answer, Created { entry: entry(), opened: Opened::default() });
    }

    fn get_xattr(&self, asked: GetXattr<'_>, answer: Answer<'_, Xattr>) {
        xattr_name(asked.name);
        self.say(answer, asked.size);
    }

    fn set_xattr(&self, asked: SetXattr<'_>, answer: Answer<'_, Done>) {
        xattr_name(asked.name);
        assert!(asked.value.len() <= MOST_VALUE_BYTES);
        self.give(answer, Done);
    }

    fn list_xattrs(&self, asked: ListXattrs, answer: Answer<'_, Xattr>) {
        self.say(answer, asked.size);
    }

    fn remove_xattr(&self, asked: RemoveXattr<'_>, answer: Answer<'_, Done>) {
        xattr_name(asked.name);
        self.give(answer, Done);
    }

    fn open(&self, _: Open, answer: Answer<'_, Opened>) {
        self.give(answer, Opened { direct: true, ..Opened::default() });
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        range(asked.offset, asked.size.into());
        let length = asked.size.min(3) as usize;
        match self.is_late {
            true => answer.later().give(Data::from(&b"abc"[..length])),
            false => answer.fill(|sink| sink.put(&b"abc"[..length])),
        }
    }

    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        range(asked.offset, asked.data.length() as u64);
        let written = Written(asked.data.into_bytes().len() as u32);
        self.give(answer, written);
    }

    fn flush(&self, _: Close, answer: Answer<'_, Done>) {
        self.give(answer, Done);
    }

    fn fsync(&self, _: Fsync, answer: Answer<'_, Done>) {
        self.give(answer, Done);
    }

    fn open_directory(&self, _: Open, answer: Answer<'_, Opened>) {
        self.give(answer, Opened::default());
    }

    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let mut listing = answer.listing();
        let has_room = listing.push(&ENTRY);
        assert_eq!(has_room, asked.size as usize >= DIRENT_BYTES + 8);
        self.give(answer, listing);
    }

    fn read_directory_plus(&self, asked: ReadDirectory, answer: Answer<'_, ListingPlus>) {
        let mut listing = answer.listing();
        let has_room = listing.push(&ENTRY, Some(&entry()));
        assert_eq!(has_room, asked.size as usize >= ENTRY_BYTES + DIRENT_BYTES + 8);
        self.give(answer, listing);
    }

    fn fsync_directory(&self, _: Fsync, answer: Answer<'_, Done>) {
        self.give(answer, Done);
    }

    fn statistics(&self, _: u64, answer: Answer<'_, Statistics>) {
        self.give(answer, Statistics::default());
    }

    fn allocate(&self, asked: Allocate, answer: Answer<'_, Done>) {
        range(asked.offset, asked.length);
        assert!(asked.length > 0);
        self.give(answer, Done);
    }

    fn seek(&self, asked: Seek, answer: Answer<'_, Position>) {
        range(asked.offset, 0);
        self.give(answer, Position(asked.offset));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let mut seeds: Vec<_> =
            entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_holds() {
        for (target, body) in TARGETS {
            assert!(!seeds(target).is_empty());
            for (name, bytes) in seeds(target) {
                println!("{target} {name}"); // shown only when the body panics
                body(&bytes);
            }
        }
    }

    proptest! {
        /// Seeds with a few bytes changed get further than random bytes.
        #[test]
        fn a_damaged_seed_holds(pick in any::<prop::sample::Index>(), damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8)) {
            for (target, body) in TARGETS {
                let seeds = seeds(target);
                let mut bytes = pick.get(&seeds).1.clone();
                for (place, value) in &damage {
                    *place.get_mut(&mut bytes) = *value;
                }
                body(&bytes);
            }
        }

        #[test]
        fn any_bytes_hold(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            TARGETS.iter().for_each(|(_, body)| body(&bytes));
        }

        /// Any body of each operation, of the length that it needs and around it.
        #[test]
        fn any_fields_hold(opcode in 0..60_u32, fields in prop::collection::vec(any::<u8>(), 0..100), text in "[a-c/.]{0,9}", bit in any::<bool>()) {
            let mut body = fields;
            if bit {
                body.resize(operation_bytes(opcode), 0);
            }
            body.extend_from_slice(text.as_bytes());
            body.extend_from_slice(&[0, b'x', 0]);
            let length = (IN_HEADER_BYTES + body.len()) as u32;
            let header = InHeader { length, opcode, unique: 1, node: 1, uid: 0, gid: 0, pid: 1, extensions: 0 };
            requests(&[&header.encode()[..], &body].concat());
        }
    }
}
