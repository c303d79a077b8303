//! The RDB scanner finds the end of every value that real servers save.

use remora_lab::{Kind, Server, fill_every_type, require};
use remora_redis::rdb::{Found, Scanner, TAIL_BYTES, Text};

/// Databases and keys of the long strings in a file, and the position of its end mark.
fn scan(file: &[u8], least: u64, piece: usize) -> (Vec<Text>, u64) {
    let (mut scanner, mut texts, mut at) = (Scanner::new(least), Vec::new(), 0);
    loop {
        at += scanner.skip((file.len() - at) as u64) as usize;
        let (taken, found) = scanner.feed(&file[at..file.len().min(at + piece)]).unwrap();
        at += taken;
        match found {
            Some(Found::Text(text)) => texts.push(text),
            Some(Found::Run(run)) => panic!("a run where none was asked for: {run:?}"),
            Some(Found::End { at }) => return (texts, at),
            None => assert!(at < file.len(), "the end was not found"),
        }
    }
}

fn saved(server: &Server) -> Vec<u8> {
    server.client().unwrap().ok(&["SAVE"]).unwrap();
    std::fs::read(server.folder().join(server.configured("dbfilename").unwrap())).unwrap()
}

/// Adds what the data set has only in small: a list in a separate node, hashes that are tables, a stream with groups.
fn grow(server: &Server) {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", "3"]).unwrap();
    for number in 0..600 {
        let number = number.to_string();
        client.int(&["HSET", "table", &number, "value"]).unwrap();
        client.int(&["SADD", "members", &format!("member {number}")]).unwrap();
        client.int(&["ZADD", "scores", &number, &format!("member {number}")]).unwrap();
        client.int(&["RPUSH", "list", &number, &"plain ".repeat(40)]).unwrap();
        client.bytes(&["XADD", "stream", "*", "field", &number]).unwrap();
    }
    client.ok(&["XGROUP", "CREATE", "stream", "group", "0"]).unwrap();
    client.list(&["XREADGROUP", "GROUP", "group", "consumer", "COUNT", "50", "STREAMS", "stream", ">"]).unwrap();
    if server.kind().expires_hash_fields() {
        client.list(&["HEXPIRE", "table", "1000", "FIELDS", "2", "1", "2"]).unwrap();
    }
}

fn every_type_ends_where_the_scanner_finds_it(kind: Kind, compressed: &str) {
    let server = Server::builder(kind).config("rdbcompression", compressed).start().unwrap();
    let mut client = server.client().unwrap();
    fill_every_type(&mut client, 5).unwrap();
    grow(&server);
    client.ok(&["SELECT", "5"]).unwrap();
    let noise = remora_lab::Random::new(1).bytes(70_000);
    client.ok(&[b"SET".as_slice(), b"long", &noise, b"PXAT", b"4102444800000"]).unwrap();
    let file = saved(&server);
    for piece in [1, 61, 4096, 1 << 20] {
        let (texts, end) = scan(&file, 60_000, piece);
        assert_eq!(end as usize, file.len() - TAIL_BYTES);
        let long = texts.iter().find(|text| text.key == b"long" && text.database == 5).unwrap();
        assert_eq!(long.expires_ms, Some(4_102_444_800_000));
        assert_eq!(&file[long.value.start as usize..long.value.end as usize], &noise[..]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn every_type_of_every_server_ends_where_the_scanner_finds_it() {
    for kind in require::kinds() {
        every_type_ends_where_the_scanner_finds_it(kind, "yes");
        every_type_ends_where_the_scanner_finds_it(kind, "no");
    }
}

#[test]
fn an_eviction_policy_by_usage_writes_the_usage_beside_each_key() {
    for kind in require::kinds() {
        for policy in ["allkeys-lfu", "allkeys-lru"] {
            let server = Server::builder(kind).config("maxmemory-policy", policy).start().unwrap();
            server.client().unwrap().ok(&["SET", "key", "some value"]).unwrap();
            let (texts, _) = scan(&saved(&server), 5, 64);
            assert!(texts[0].usage.is_some(), "{policy}: {texts:?}");
        }
    }
}
