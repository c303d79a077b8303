//! Loading out of shown memory, into real servers, from a primary that is the test itself.
#![allow(clippy::unwrap_used)]

mod primary;

use primary::{END, OFFSET, Primary, REPLID, Shown, fields, noise, wait_for_link, with_module};
use remora_lab::{Kind, require};
use remora_redis::rdb::reference::Word;
use remora_redis::rdb::{Usage, Writer};

/// The head of a snapshot, and a few keys of its own.
fn beginning(kind: Kind) -> Vec<u8> {
    let mut writer = Writer::new(if kind == Kind::Redis7 { 10 } else { 11 });
    writer.aux("repl-stream-db", "0").select_db(0).string("ordinary", "one", None);
    let mut bytes = writer.finish();
    bytes.truncate(bytes.len() - END.len());
    bytes
}

fn text(key: &[u8], length: u64) -> Word<'_> {
    Word::Text { database: 0, key, length, expires_ms: None, usage: None }
}

#[test]
fn strings_come_out_of_memory_between_keys_that_come_by_the_link() {
    for kind in require::kinds() {
        let replica = with_module(kind).config("maxmemory-policy", "allkeys-lru").start().unwrap();
        let bytes = noise(3, 300_000);
        let shown = Shown::of(&bytes);
        let mut primary = Primary::of(&replica);
        shown.to(&replica, &[]).unwrap();

        primary.send(&beginning(kind));
        primary.send(&shown.hello());
        shown.wait_for(1);
        let usage = (kind == Kind::Redis7).then_some(Usage::Idle(500));
        let far = 4_102_444_800_000;
        primary.send(&fields(&[
            Word::Text { database: 9, key: b"pieces", length: 250_000, expires_ms: Some(far), usage },
            Word::Piece { offset: 10, length: 100_000 },
        ]));
        primary.send(b"\xFE\x02\x00\x05other\x03two");
        primary
            .send(&fields(&[Word::Piece { offset: 150_000, length: 149_999 }, Word::Piece { offset: 0, length: 1 }]));
        primary.send(&fields(&[text(b"one byte", 1), Word::Piece { offset: 5, length: 1 }]));
        shown.wait_for(4);
        primary.end();
        wait_for_link(&replica, "up");

        assert_eq!(replica.fact("master_replid").unwrap(), REPLID);
        assert_eq!(replica.fact("master_repl_offset").unwrap(), OFFSET.to_string());
        let mut client = replica.client().unwrap();
        assert_eq!(client.text(&["GET", "ordinary"]).unwrap(), "one");
        assert_eq!(client.bytes(&["GET", "one byte"]).unwrap().unwrap(), [bytes[5]]);
        client.ok(&["SELECT", "2"]).unwrap();
        assert_eq!(client.text(&["GET", "other"]).unwrap(), "two");
        client.ok(&["SELECT", "9"]).unwrap();
        let idle = client.int(&["OBJECT", "IDLETIME", "pieces"]).unwrap();
        let wanted = if usage.is_some() { 500 } else { 0 };
        assert!((wanted..wanted + 60).contains(&idle), "{kind}: {idle}");
        assert_eq!(client.int(&["PEXPIRETIME", "pieces"]).unwrap(), far as i64);
        let whole = [&bytes[10..100_010], &bytes[150_000..299_999], &bytes[..1]].concat();
        assert!(client.bytes(&["GET", "pieces"]).unwrap().unwrap() == whole);
    }
}
