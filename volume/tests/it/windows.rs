//! How many writes are under way: over a link with late answers, and with several writers at a server.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_lab::link::Link;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Request, Volume, WindowSize, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};

use crate::cluster::{Cluster, options, server_options, until};

const MIB: u64 = 1 << 20;

/// A volume, and the writes of it that were completed.
struct Load {
    volume: Volume,
    completed: Arc<AtomicU64>,
}

impl Load {
    /// Writes of a block that are completed in a second, with always more of them submitted than any window takes.
    fn rate(&self, span: Duration) -> f64 {
        let (began, before) = (Instant::now(), self.completed.load(Ordering::Relaxed));
        let data = Bytes::from(vec![5; BLOCK_BYTES]);
        let mut first = 0;
        while began.elapsed() < span {
            first = (first + 1) % self.volume.shape().blocks();
            let completed = Arc::clone(&self.completed);
            let done =
                move |result: Result<Bytes, Error>| _ = completed.fetch_add(result.is_ok().into(), Ordering::Relaxed);
            self.volume.submit(Request::write(first, data.clone()), done).unwrap();
        }
        (self.completed.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64()
    }
}

/// 60 MB/s and 5 ms: some 75 writes of a block fill it.
#[test]
#[ignore = "long: make test-all"]
fn over_a_link_with_late_answers_a_window_grows_until_it_is_not_the_limit() {
    let cluster = Cluster::new(1, 1, 1000);
    let Address::Tcp(server) = cluster.addresses[0] else { unreachable!("its servers listen on TCP") };
    let link = Link::new(server, Duration::from_millis(5), 60e6).unwrap();
    let sizes = ["fixed:32", "fixed:1024", "adaptive"];
    let loads = sizes.map(|size| {
        let options = ClientOptions { window: size.parse().unwrap(), ..options() };
        // The next one would replace it, so each has a volume of its own.
        let shape = Shape::new(new_id().unwrap(), 1000, Copies::new(1, 1).unwrap()).unwrap();
        Volume::create(shape, &[cluster.addresses[0].clone()], &options).unwrap();
        let volume = Volume::open(shape, &[Address::Tcp(link.address())], &options).unwrap();
        Load { volume, completed: Arc::default() }
    });
    loads.iter().for_each(|load| _ = load.rate(Duration::from_millis(400))); // the window grows
    // The machine may be busy with something else: what holds in one of some rounds holds.
    let mut found = Vec::new();
    for _ in 0..6 {
        let [few, many, adaptive] = [0, 1, 2].map(|number| loads[number].rate(Duration::from_millis(400)));
        println!("fixed:32 {few:.0}/s, fixed:1024 {many:.0}/s, adaptive {adaptive:.0}/s");
        assert!(few <= 0.7 * many, "fixed:32 {few:.0}/s, fixed:1024 {many:.0}/s");
        found.push(adaptive / many);
        if adaptive >= 0.95 * many {
            break;
        }
    }
    assert!(found.iter().any(|ratio| *ratio >= 0.95), "adaptive beside fixed:1024: {found:?}");
    let (now, most) = cluster.servers[0].as_ref().unwrap().staging();
    assert!(now <= most && most <= 256 * MIB, "{now} and {most} bytes");
}

#[test]
#[ignore = "long: make test-all"]
fn writers_share_what_a_server_has_and_never_have_more() {
    let staging = 40 * MIB;
    let server = Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &ServerOptions { staging, ..server_options() });
    let server = server.unwrap();
    // A busy machine is not what this is about.
    let copy_limit = Duration::from_secs(20);
    let options = ClientOptions { window: WindowSize::Fixed(1024), copy_limit, ..options() };
    let open = || {
        let shape = Shape::new(new_id().unwrap(), 4096, Copies::new(1, 1).unwrap()).unwrap();
        Volume::create(shape, &[server.address().clone()], &options).unwrap();
        Volume::open(shape, &[server.address().clone()], &options)
    };
    let volumes: Vec<Volume> = (0..4).map(|_| open().unwrap()).collect();
    std::thread::scope(|scope| {
        // They begin one after the other: the first one has most of it until the others want some.
        for (number, volume) in volumes.iter().enumerate() {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(200) * number as u32);
                let data = Bytes::from(vec![number as u8; MIB as usize]);
                let (done, all) = mpsc::channel();
                for place in 0..100_u64 {
                    let done = done.clone();
                    let request = Request::write(place % 16 * 256, data.clone());
                    volume.submit(request, move |result| done.send(result.map(drop)).unwrap()).unwrap();
                }
                (0..100).for_each(|_| all.recv().unwrap().unwrap());
            });
        }
    });
    let (now, most) = server.staging();
    println!("{} MiB are granted, and at most {} MiB were", now / MIB, most / MIB);
    assert!(most > 20 * MIB && most <= staging, "{most}");
    // Ten writers have the least that one can do with, if the others want no more. Then one has to go before another one
    // can come.
    let mut others: Vec<Volume> = Vec::new();
    while let Ok(volume) = open() {
        others.push(volume);
        assert!(others.len() <= 6 && server.staging().1 <= staging);
    }
    println!("{} writers", volumes.len() + others.len());
    assert!(!others.is_empty());
    others.pop();
    until("there is room again", || open().is_ok());
}
