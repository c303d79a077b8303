//! The simplest rival: epoll, `recv` and `send`, one thread on each side, messages of known length without heads,
//! checksums or sessions. Messages that arrive together are answered together. It is the lowest possible cost of a
//! messenger over TCP.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::histogram::Histogram;
use super::server::{self, Server};
use super::{Case, Outcome, content};
use crate::cpu;

/// One side of a connection: the bytes received of the next message, and the bytes still to be sent.
struct Pipe {
    stream: TcpStream,
    /// Bytes received of an incomplete message.
    partial: usize,
    /// Bytes of replies or requests still to be sent.
    owed: usize,
    watched_for_room: bool,
}

impl Pipe {
    fn new(stream: TcpStream) -> io::Result<Pipe> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Pipe { stream, partial: 0, owed: 0, watched_for_room: false })
    }

    /// Reads once, and returns how many messages of that length are complete now. `None` at the end.
    fn read(&mut self, buffer: &mut [u8], length: usize) -> io::Result<Option<usize>> {
        match self.stream.read(buffer) {
            Ok(0) => Ok(None),
            Ok(count) => {
                let have = self.partial + count;
                self.partial = have % length;
                Ok(Some(have / length))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Some(0)),
            Err(error) => Err(error),
        }
    }

    /// Sends the pending bytes, from a memory of repeated content.
    fn write(&mut self, content: &[u8], epoll: impl std::os::fd::AsFd, name: u64) -> io::Result<()> {
        while self.owed > 0 {
            let length = self.owed.min(content.len());
            match self.stream.write(&content[..length]) {
                Ok(count) => self.owed -= count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let blocked = self.owed > 0;
        if blocked != self.watched_for_room {
            self.watched_for_room = blocked;
            let flags = if blocked { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            epoll::modify(epoll, &self.stream, EventData::new_u64(name), flags)?;
        }
        Ok(())
    }
}

/// Serves until its standard input ends.
///
/// # Errors
/// A system call failed.
pub fn serve(request: usize, reply: usize) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    std::thread::spawn(move || answer(&listener, request, reply));
    server::serve(&address)
}

fn answer(listener: &TcpListener, request: usize, reply: usize) -> io::Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    listener.set_nonblocking(true)?;
    epoll::add(&epoll, listener, EventData::new_u64(u64::MAX), EventFlags::IN)?;
    let mut pipes: Vec<Option<Pipe>> = Vec::new();
    let (mut buffer, content) = (vec![0; BUFFER_BYTES], content(BUFFER_BYTES.max(reply)));
    let mut events = Vec::with_capacity(256);
    loop {
        events.clear();
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let name = { event.data }.u64();
            if name == u64::MAX {
                while let Ok((stream, _)) = listener.accept() {
                    let pipe = Pipe::new(stream)?;
                    epoll::add(&epoll, &pipe.stream, EventData::new_u64(pipes.len() as u64), EventFlags::IN)?;
                    pipes.push(Some(pipe));
                }
                continue;
            }
            let Some(slot) = pipes.get_mut(name as usize) else { continue };
            let Some(pipe) = slot else { continue };
            match pipe.read(&mut buffer, request) {
                Ok(Some(count)) => {
                    pipe.owed += count * reply;
                    pipe.write(&content, &epoll, name)?;
                }
                Ok(None) | Err(_) => *slot = None,
            }
        }
    }
}

/// Sends requests for `time`.
///
/// # Errors
/// A system call failed.
pub fn measure(server: &mut Server, case: &Case, time: Duration) -> io::Result<Outcome> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut pipes = Vec::new();
    for name in 0..case.connections {
        let pipe = Pipe::new(TcpStream::connect(&server.address)?)?;
        epoll::add(&epoll, &pipe.stream, EventData::new_u64(name as u64), EventFlags::IN)?;
        pipes.push(pipe);
    }
    let (mut buffer, content) = (vec![0; BUFFER_BYTES], content(BUFFER_BYTES.max(case.request)));
    let mut asked: Vec<std::collections::VecDeque<Instant>> = vec![Default::default(); case.connections];
    let mut histogram = Histogram::default();
    let (server_before, before) = (server.cpu()?, cpu::of_self()?);
    let start = Instant::now();
    for (name, pipe) in pipes.iter_mut().enumerate() {
        pipe.owed = case.depth * case.request;
        asked[name].extend(std::iter::repeat_n(start, case.depth));
        pipe.write(&content, &epoll, name as u64)?;
    }
    let mut events = Vec::with_capacity(256);
    let mut now = start;
    while now - start < time {
        events.clear();
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let name = { event.data }.u64();
            let (pipe, asked) = (&mut pipes[name as usize], &mut asked[name as usize]);
            let gone = || io::Error::other("the raw server has closed a connection");
            let count = pipe.read(&mut buffer, case.reply)?.ok_or_else(gone)?;
            now = Instant::now();
            for _ in 0..count {
                let since = asked.pop_front().ok_or_else(|| io::Error::other("a reply without a request"))?;
                histogram.record(now - since);
                asked.push_back(now);
            }
            pipe.owed += count * case.request;
            pipe.write(&content, &epoll, name)?;
        }
    }
    let took = start.elapsed();
    Ok(Outcome::of(&histogram, took, cpu::of_self()? - before, server.cpu()? - server_before))
}

/// As much as the messenger receives at once.
const BUFFER_BYTES: usize = 256 * 1024;
