//! Takes a snapshot of a running server and writes it to a file: the replica's whole side in one blocking loop.
//!
//! ```sh
//! cargo run -p remora-redis --example snapshot -- 127.0.0.1:6379 /tmp/copy.rdb
//! ```
//!
//! Not a tool: no TLS, no time-outs, and the whole snapshot in memory. It shows what a driver of [`Client`] has to do.
//! Its counterpart is `feed.rs`, which makes a replica of such a file.

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;

use remora_redis::psync::client::{Client, EofMark, Event, Options};
use remora_redis::psync::{MARK_BYTES, Payload};
use remora_redis::rdb::{Head, TAIL_BYTES, Tail, crc64};

fn main() -> Result<(), Box<dyn Error>> {
    let [server, file] = arguments()?;
    let mut stream = TcpStream::connect(&server)?;
    let (payload, early) = shake_hands(&mut stream)?;
    let snapshot = receive(&mut stream, payload, early)?;
    describe(&snapshot)?;
    std::fs::write(&file, &snapshot)?;
    println!("{file}: {} bytes", snapshot.len());
    Ok(())
}

fn arguments() -> Result<[String; 2], String> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    given.try_into().map_err(|_| "usage: snapshot HOST:PORT FILE".to_owned())
}

/// Runs the handshake until the payload begins. Returns how the payload ends, and those of its bytes that were read
/// with the end of the handshake.
fn shake_hands(stream: &mut TcpStream) -> Result<(Payload, Vec<u8>), Box<dyn Error>> {
    let options = Options { password: std::env::var("PASSWORD").ok(), ..Options::default() };
    let mut client = Client::new(options);
    let mut buffer = [0; 16 * 1024];
    loop {
        stream.write_all(&client.take_output())?;
        let received = stream.read(&mut buffer)?;
        if received == 0 {
            return Err("the server closed the connection".into());
        }
        let consumed = client.handle_input(&buffer[..received])?;
        while let Some(event) = client.poll_event() {
            println!("{event:?}");
            if let Event::Payload(payload) = event {
                return Ok((payload, buffer[consumed..received].to_vec()));
            }
        }
    }
}

fn receive(stream: &mut TcpStream, payload: Payload, early: Vec<u8>) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut snapshot = early;
    match payload {
        Payload::Length(length) => {
            let missing = length.saturating_sub(snapshot.len() as u64);
            stream.take(missing).read_to_end(&mut snapshot)?;
        }
        Payload::Mark(mark) => {
            let mut watch = EofMark::new(mark);
            let mut buffer = [0; 64 * 1024];
            let mut ended = watch.observe(&snapshot, snapshot.len());
            while !ended {
                let received = stream.read(&mut buffer)?;
                if received == 0 {
                    return Err("the server closed the connection before the end of the snapshot".into());
                }
                let chunk = &buffer[..received];
                snapshot.extend_from_slice(chunk);
                ended = watch.observe(chunk, received);
            }
            snapshot.truncate(snapshot.len() - MARK_BYTES);
        }
    }
    Ok(snapshot)
}

/// Prints the head, and checks that the snapshot is complete.
fn describe(snapshot: &[u8]) -> Result<(), Box<dyn Error>> {
    let (head, _) = Head::parse(snapshot)?.ok_or("the snapshot is shorter than its head")?;
    println!("{:?} version {}", head.magic, head.version);
    for (name, value) in &head.aux {
        println!("  {}: {}", name.escape_ascii(), value.escape_ascii());
    }
    let tail: [u8; TAIL_BYTES] = *snapshot.last_chunk().ok_or("the snapshot is shorter than its tail")?;
    let checksum = Tail::parse(tail)?.checksum;
    let content = &snapshot[..snapshot.len() - size_of_val(&checksum)];
    match checksum {
        0 => println!("no checksum"),
        _ if checksum == crc64(0, content) => println!("checksum {checksum:016x} is right"),
        _ => return Err("the checksum is wrong".into()),
    }
    Ok(())
}
