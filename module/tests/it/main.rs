//! The module in real servers: its commands by hand, and loads from a primary that is the test itself.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod capture;
mod fast;
mod sweep;
mod twins;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::shm::Place;
use remora_fabric::{Handover, Memory, Pages};
use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Random, Server};
use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::server::{Event, Options, Server as PrimaryRole};
use remora_redis::rdb::reference::{TICKET_BYTES, Word, field};
use remora_redis::resp::Frame;
use remora_table::LoadPage;

// A fake primary: answers one replica's handshake and sends it what a test wants it to load.
//
// And the agent's other part: memory, handed to a server with the module.

/// A time that only a broken machine exceeds.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// The library, as cargo built it beside this test.
pub(crate) fn library() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.set_file_name("libremora_module.so");
    assert!(path.is_file(), "{} was not built", path.display());
    path
}

/// A server that has the module and loads from its link.
pub(crate) fn with_module(kind: Kind) -> Builder {
    let way = if kind == Kind::Redis7 { "on-empty-db" } else { "flush-before-load" };
    let layout = layout().map(|path| format!(" layout {}", path.display())).unwrap_or_default();
    let module = format!("{}{layout}", library().display());
    Server::builder(kind).config("loadmodule", module).config("repl-diskless-load", way)
}

/// The layout of a build that is not compiled into the module, for tests on such a build.
pub(crate) fn layout() -> Option<PathBuf> {
    std::env::var_os("REMORA_LAYOUT").map(PathBuf::from)
}

pub(crate) const REPLID: &str = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
pub(crate) const OFFSET: u64 = 307_366;
/// The end mark of a snapshot without a checksum.
pub(crate) const END: &[u8] = b"\xFF\0\0\0\0\0\0\0\0";
const MARK: [u8; 40] = [b'm'; 40];

/// One replica's link.
pub(crate) struct Primary {
    listener: TcpListener,
    link: Option<TcpStream>,
    role: PrimaryRole,
}

impl Primary {
    /// Makes the server follow us, and answers it up to the point where it waits for a snapshot.
    pub(crate) fn of(replica: &Server) -> Primary {
        let mut primary = Primary::asked_by(replica);
        primary.answer();
        primary
    }

    /// Makes the server follow us, up to the point where it waits for our answer: it does not load yet, and executes
    /// commands of clients.
    pub(crate) fn asked_by(replica: &Server) -> Primary {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        replica.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", &port]).unwrap();
        let mut primary = Primary { listener, link: None, role: PrimaryRole::new(Options::default()) };
        primary.wait_to_be_asked();
        primary
    }
    /// A snapshot follows.
    pub(crate) fn answer(&mut self) {
        self.role.full_resync(&ReplId::parse(REPLID.as_bytes()).unwrap(), OFFSET);
        self.role.payload(&Payload::Mark(MARK));
        let answer = self.role.take_output();
        self.send(&answer);
    }

    /// Waits for the server's next attempt, up to the point where it waits for our answer.
    pub(crate) fn wait_to_be_asked(&mut self) {
        // A server that has just lost its last primary may close the connection once more before it stays; one that has
        // ended does not come again.
        let began = Instant::now();
        while !self.try_to_shake_hands() {
            assert!(began.elapsed() < LONG, "the server hangs up in every handshake");
        }
    }

    /// The server's next attempt. `false`: it closed the connection.
    fn try_to_shake_hands(&mut self) -> bool {
        let mut link = self.accept();
        link.set_read_timeout(Some(LONG)).unwrap();
        link.set_write_timeout(Some(LONG)).unwrap();
        self.role = PrimaryRole::new(Options::default());
        let role = &mut self.role;
        let mut buffer = [0; 4096];
        loop {
            let read = match link.read(&mut buffer) {
                Ok(read) if read > 0 => read,
                _ => return false,
            };
            role.handle_input(&buffer[..read]).unwrap();
            let asked = std::iter::from_fn(|| role.poll_event()).any(|event| matches!(event, Event::Psync { .. }));
            link.write_all(&role.take_output()).unwrap();
            if asked {
                self.link = Some(link);
                return true;
            }
        }
    }

    fn accept(&self) -> TcpStream {
        self.listener.set_nonblocking(true).unwrap();
        let began = Instant::now();
        let link = loop {
            match self.listener.accept() {
                Ok((link, _)) => break link,
                Err(error) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
                Err(_) => assert!(began.elapsed() < LONG, "the server does not come"),
            }
            // Checked far more often than `wait_until` does: some tests make the server reconnect a thousand times.
            thread::sleep(Duration::from_micros(200));
        };
        link.set_nonblocking(false).unwrap();
        link
    }

    /// Sends a part of the snapshot. False if the server closed the connection.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> bool {
        self.link.as_mut().unwrap().write_all(bytes).is_ok()
    }

    /// Sends the end: the snapshot is complete.
    pub(crate) fn end(&mut self) -> bool {
        self.send(END) && self.send(&MARK)
    }

    /// Closes the link.
    pub(crate) fn hang_up(&mut self) {
        self.link = None;
    }

    /// Waits until the server closes the connection.
    pub(crate) fn wait_for_the_end(&mut self) {
        let mut buffer = [0; 4096];
        let link = self.link.as_mut().unwrap();
        loop {
            match link.read(&mut buffer) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }
}

/// Memory that was handed to a server.
pub(crate) struct Shown {
    pub(crate) memory: Memory,
    pub(crate) page: LoadPage,
    pub(crate) ticket: [u8; TICKET_BYTES],
}

impl Shown {
    /// Creates memory with these bytes; it is not handed over yet.
    pub(crate) fn of(bytes: &[u8]) -> Shown {
        let memory = Memory::create("test", bytes.len() as u64, Pages::Small).unwrap();
        memory.write(0, bytes).unwrap();
        Shown { memory, page: LoadPage::create().unwrap(), ticket: [7; TICKET_BYTES] }
    }

    /// Hands it to the server.
    pub(crate) fn to(&self, server: &Server, more: &[&str]) -> Result<(), String> {
        self.offered_to(server, more).map(drop)
    }

    /// Hands it to the server; returns the reply.
    pub(crate) fn offered_to(&self, server: &Server, more: &[&str]) -> Result<Frame, String> {
        let handover = Handover::bind(&Place::Abstract).unwrap();
        let ticket: String = self.ticket.iter().map(|byte| format!("{byte:02x}")).collect();
        let (address, secret, length) = (handover.address(), handover.secret(), self.memory.length().to_string());
        let mut client = server.client().unwrap();
        let mut command = vec!["REMORA.LOAD", &address, &secret, &ticket, &length];
        command.extend(more);
        client.send(&command).unwrap();
        let read_only = self.memory.reopen_read_only().unwrap();
        // If the server refuses before it takes the descriptors, the giver waits in vain.
        let given = handover.give(&[read_only.as_fd(), self.page.memory().as_fd()], Duration::from_secs(2));
        match client.receive().unwrap() {
            Frame::Error(text) => Err(format!("{}; {given:?}", String::from_utf8_lossy(&text))),
            reply => {
                given.unwrap();
                Ok(reply)
            }
        }
    }

    /// The first field.
    pub(crate) fn hello(&self) -> Vec<u8> {
        fields(&[Word::Hello { ticket: self.ticket }])
    }

    /// Waits until `done` fields are counted.
    pub(crate) fn wait_for(&self, done: u64) {
        let began = Instant::now();
        while self.page.done() < done {
            assert_eq!(self.page.refusal(), None);
            assert!(began.elapsed() < LONG, "{} of {done} fields were done", self.page.done());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// One field with these words.
pub(crate) fn fields(words: &[Word<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    words.iter().for_each(|word| word.encode(&mut bytes));
    field(&bytes)
}

/// Bytes that compress badly.
pub(crate) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    Random::new(seed).bytes(bytes)
}

/// Waits until the server's link has that status.
pub(crate) fn wait_for_link(server: &Server, status: &str) {
    wait_until("the link to change", LONG, || {
        let found = server.fact("master_link_status")?;
        Ok(if found == status { Ok(()) } else { Err(found) })
    })
    .unwrap();
}
