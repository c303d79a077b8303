//! Data sets of a known size, which no server compresses.

use remora_lab::server::wait_until;
use remora_lab::{Random, Server};

use super::{LONG, Stage, number};

/// Bytes of one value of [`fill`].
const VALUE: usize = 128 << 10;

/// Bytes of unsent commands at which they are flushed.
const QUEUE: usize = 4 << 20;

/// Fills a server with `keys` values of `bytes` incompressible bytes each, by `remora load`.
pub(crate) fn load(server: &Server, keys: u64, bytes: u64) {
    let (url, keys, bytes) = (server.url(), keys.to_string(), bytes.to_string());
    Stage::new().end(&["load", "--server", &url, "--keys", &keys, "--value-size", &bytes], 0);
}

/// Adds keys of another name.
pub(crate) fn load_small(server: &Server, keys: u64, bytes: usize) {
    let mut random = Random::new(keys);
    set_all(server, (0..keys).map(|number| (format!("small {number}"), random.bytes(bytes))));
}

/// Fills database 0 with `mebibytes` MiB of random data in values of 128 KiB.
pub(crate) fn fill(server: &Server, mebibytes: usize, seed: u64) {
    let mut random = Random::new(seed);
    let keys = mebibytes * (1 << 20) / VALUE;
    set_all(server, (0..keys).map(|number| (format!("noise {number}"), random.bytes(VALUE))));
}

/// Fills database 0 with `keys` keys of half a KiB of random data, each with `word` at its beginning.
pub(crate) fn fill_keys(server: &Server, keys: usize, word: &str) {
    let mut random = Random::new(keys as u64);
    let mut value = || [word.as_bytes(), b" ", &random.bytes(512)].concat();
    set_all(server, (0..keys).map(|number| (format!("key {number}"), value())));
}

fn set_all(server: &Server, pairs: impl Iterator<Item = (String, Vec<u8>)>) {
    let mut client = server.client().unwrap();
    let mut sent = 0;
    for (key, value) in pairs {
        client.queue(&[b"SET".to_vec(), key.into_bytes(), value]);
        sent += 1;
        if client.queued() > QUEUE {
            client.flush().unwrap();
        }
    }
    for _ in 0..sent {
        let answer = client.receive().unwrap();
        assert!(answer.as_error().is_none(), "{answer:?}");
    }
}

/// Writes until the primary's backlog of 16 KiB no longer holds its first MiB. It gives up what its replicas have got
/// when it writes more.
pub(crate) fn write_past_the_backlog(primary: &Server) {
    fill(primary, 4, 4);
    wait_until("the primary to give up its first bytes", LONG, || {
        primary.client()?.ok(&["SET", "one", "more"])?;
        let first = number(primary, "repl_backlog_first_byte_offset");
        Ok(if first > 1 << 20 { Ok(()) } else { Err(first.to_string()) })
    })
    .unwrap();
}
