//! Rates of a volume on this host: servers and the client in one process, connected over loopback, or by shared memory.
//! Each way of reading and writing is measured in turn, several times, and the medians are shown.
//!
//! `cargo run --release -p remora-volume --example rates [shm]`

use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Reads, Request, Volume, WindowSize, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
use remora_volume::wire::Run;

/// How long each case is measured in each round.
const SPAN: Duration = Duration::from_millis(400);

/// Rounds, of which the median is shown.
const ROUNDS: usize = 5;

/// 256 MiB: more than the processor's caches hold.
const BLOCKS: u64 = 64 * 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = ServerOptions { lanes: Some(0), ..ServerOptions::default() };
    let by_shm = std::env::args().nth(1).as_deref() == Some("shm");
    let folder = tempfile::tempdir()?;
    let mut servers = Vec::new();
    for number in 0..3 {
        let socket = folder.path().join(number.to_string());
        let address = if by_shm { Address::Shm(socket) } else { "tcp:127.0.0.1:0".parse()? };
        servers.push(Server::start(&address, &options)?);
    }
    let addresses: Vec<Address> = servers.iter().map(|server| server.address().clone()).collect();
    let copies = Copies::new(3, 2).ok_or("three copies, of which two hold a write")?;
    let shape = Shape::new(new_id()?, BLOCKS, copies).ok_or("the shape of a volume")?;
    Volume::create(shape, &addresses, &ClientOptions::default())?;
    fill(&Volume::open(shape, &addresses, &ClientOptions::default())?)?;
    for (what, depth, blocks, is_read) in [
        ("read 4 KiB, one at a time", 1, 1, true),
        ("read 4 KiB, 32 at a time", 32, 1, true),
        ("read 1 MiB, one at a time", 1, 256, true),
        ("read 1 MiB, 8 at a time", 8, 256, true),
        ("write 4 KiB, one at a time", 1, 1, false),
        ("write 4 KiB, 32 at a time", 32, 1, false),
        ("write 4 KiB, 1024 at a time", 1024, 1, false),
        ("write 1 MiB, one at a time", 1, 256, false),
        ("write 1 MiB, 8 at a time", 8, 256, false),
        ("write 1 MiB, 32 at a time", 32, 256, false),
    ] {
        println!("{what}");
        let reading = |reads| (format!("{reads:?}"), ClientOptions { reads, ..Default::default() });
        let writing = |window: WindowSize| (window.to_string(), ClientOptions { window, ..Default::default() });
        let ways = if is_read {
            [Reads::Asked, Reads::Far, Reads::Here].map(reading)
        } else {
            [WindowSize::Fixed(32), WindowSize::Fixed(1024), WindowSize::Adaptive].map(writing)
        };
        let mut rates = vec![Vec::new(); ways.len()];
        for _ in 0..ROUNDS {
            for (way, rates) in ways.iter().zip(&mut rates) {
                let volume = Volume::open(shape, &addresses, &way.1)?;
                volume.read(0, 1)?;
                std::thread::sleep(Duration::from_millis(50)); // until regions are open
                rates.push(rate(&volume, depth, blocks, is_read)?);
            }
        }
        for (way, mut rates) in ways.iter().zip(rates) {
            rates.sort_by(f64::total_cmp);
            let (median, mib) = (rates[rates.len() / 2], f64::from(blocks) * BLOCK_BYTES as f64 / (1 << 20) as f64);
            println!("  {:10} {median:9.0}/s  {:7.0} MiB/s  {:7.1} µs each", way.0, median * mib, 1e6 / median);
        }
    }
    println!("read in the caller's thread");
    let volume = Volume::open(shape, &addresses, &ClientOptions::default())?;
    for blocks in [1, 256] {
        let mut times: Vec<f64> = (0..ROUNDS).map(|_| alone(&volume, blocks)).collect::<Result<_, _>>()?;
        times.sort_by(f64::total_cmp);
        println!("  {:4} KiB  {:7.1} µs each", blocks * 4, times[times.len() / 2]);
    }
    Ok(())
}

/// Microseconds for a read that this thread makes.
fn alone(volume: &Volume, blocks: u32) -> Result<f64, Error> {
    let (began, mut count, mut first) = (Instant::now(), 0, 0);
    while began.elapsed() < SPAN {
        first = (first + 7919) % (BLOCKS - u64::from(blocks));
        volume.read(first, blocks)?;
        count += 1;
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(count))
}

fn fill(volume: &Volume) -> Result<(), Error> {
    let data = Bytes::from(vec![7; 256 * BLOCK_BYTES]);
    for first in (0..BLOCKS).step_by(256) {
        volume.write(first, data.clone())?;
    }
    volume.flush()
}

/// Requests for each second.
fn rate(volume: &Volume, depth: usize, blocks: u32, is_read: bool) -> Result<f64, Error> {
    let (done, completed) = mpsc::channel();
    let data = Bytes::from(vec![9; blocks as usize * BLOCK_BYTES]);
    let mut place = 1_u64;
    let submit = |place_of: &mut u64| {
        *place_of = place_of.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let first = (*place_of >> 33) % (BLOCKS / u64::from(blocks)) * u64::from(blocks);
        let request =
            if is_read { Request::Read(Run { first, count: blocks }) } else { Request::write(first, data.clone()) };
        let done = done.clone();
        volume.submit(request, move |result| {
            let _ = done.send(result.map(drop)); // the other end waits for it
        })
    };
    let began = Instant::now();
    let mut count = 0_u32;
    for _ in 0..depth {
        submit(&mut place)?;
    }
    while began.elapsed() < SPAN {
        completed.recv().unwrap_or(Err(Error::Closed))?;
        count += 1;
        submit(&mut place)?;
    }
    for _ in 0..depth {
        completed.recv().unwrap_or(Err(Error::Closed))?;
    }
    Ok(f64::from(count + depth as u32) / began.elapsed().as_secs_f64())
}
