//! A client that says exactly what a test wants.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use remora_nbd::protocol::{
    OPTION_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command, command_flags, option,
};
use remora_nbd::request::Request;

pub struct Client {
    pub stream: UnixStream,
    structured: bool,
}

/// An answer: whose it is, what it says, and with which bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub says: Says,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Says {
    Done,
    Error(u32),
    ErrorWith(u32, String),
    Data(Vec<u8>),
    Hole(u32),
    Extents(Vec<(u32, u32)>),
}

impl Client {
    /// Connects, and chooses the first export.
    pub fn new(socket: &Path, structured: bool) -> Client {
        let mut client = Client::connect(socket);
        client.structured = structured;
        if structured {
            client.option(option::STRUCTURED_REPLY, b"");
            let base = [&[0; 4][..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
            client.option(option::SET_META_CONTEXT, &base);
        }
        client.option(option::GO, &[0; 6]);
        client
    }

    /// Connects, and says what it can.
    pub fn connect(socket: &Path) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        Client { stream, structured: false }
    }

    /// A connection that has said nothing.
    pub fn over(stream: UnixStream) -> Client {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Client { stream, structured: false }
    }

    /// Sends an option, and returns the kinds of its answers.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        self.stream.write_all(&[&head.concat(), data].concat()).unwrap();
        let mut kinds = Vec::new();
        while !matches!(kinds.last(), Some(kind) if kind & 1 << 31 != 0 || *kind == 1) {
            let head: [u8; 20] = self.take();
            let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
            kinds.push(word(12));
            self.take_bytes(word(16) as usize);
        }
        kinds
    }

    pub fn ask(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, length: u32) {
        self.stream.write_all(&request(command, flags, cookie, offset, length)).unwrap();
    }

    pub fn write(&mut self, cookie: u64, offset: u64, data: &[u8]) {
        let head = request(command::WRITE, 0, cookie, offset, data.len() as u32);
        self.stream.write_all(&[&head, data].concat()).unwrap();
    }

    /// Sends a request, and returns what is said to it.
    pub fn says(&mut self, command: u16, offset: u64, length: u32) -> Says {
        let flags = if command == command::BLOCK_STATUS { command_flags::REQ_ONE } else { 0 };
        self.ask(command, flags, 77, offset, length);
        let reply = self.reply(if command == command::READ { length } else { 0 });
        assert_eq!(reply.cookie, 77);
        reply.says
    }

    /// The next answer. `read` says how many bytes follow it if it is a simple one to a read; 0: it is not to a read.
    pub fn reply(&mut self, read: u32) -> Reply {
        let magic = u32::from_be_bytes(self.take());
        if magic == SIMPLE_REPLY_MAGIC {
            let (error, cookie) = (u32::from_be_bytes(self.take()), u64::from_be_bytes(self.take()));
            let says = match error {
                0 if read > 0 && !self.structured => Says::Data(self.take_bytes(read as usize)),
                0 => Says::Done,
                error => Says::Error(error),
            };
            return Reply { cookie, says };
        }
        assert_eq!(magic, STRUCTURED_REPLY_MAGIC);
        let [done, kind] = [self.take(), self.take()].map(u16::from_be_bytes);
        assert_eq!(done, chunk::DONE);
        let cookie = u64::from_be_bytes(self.take());
        let length = u32::from_be_bytes(self.take()) as usize;
        let data = self.take_bytes(length);
        let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| data[at + byte]));
        let says = match kind {
            chunk::OFFSET_DATA => Says::Data(data[8..].to_vec()),
            chunk::OFFSET_HOLE => Says::Hole(word(8)),
            chunk::BLOCK_STATUS => Says::Extents((4..length).step_by(8).map(|at| (word(at), word(at + 4))).collect()),
            chunk::ERROR => Says::ErrorWith(word(0), String::from_utf8(data[6..].to_vec()).unwrap()),
            kind => panic!("a chunk of kind {kind}"),
        };
        Reply { cookie, says }
    }

    /// Whether the server has closed the connection.
    pub fn is_over(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0) | Err(_))
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn take_bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }
}

pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Request { flags, command, cookie, offset, length }.encode(&mut bytes);
    bytes
}
