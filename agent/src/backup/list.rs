//! List: the list of an append-only file's parts, with a checksum in a comment, which servers skip.

use remora_redis::aof::Manifest as List;
use remora_redis::rdb::crc64;

use crate::checked_json::Checksum;

/// What stands before the checksum.
const COMMENT: &str = "# remora crc64 ";

/// The text of a list, with its checksum.
pub(super) fn checked_list(list: &List) -> String {
    let text = list.to_string();
    let crc = crc64(0, text.as_bytes());
    format!("{text}{COMMENT}{crc:016x}\n")
}

/// Compares the checksum of such a text.
pub(super) fn check(text: &[u8]) -> Checksum {
    let comment = COMMENT.as_bytes();
    let Some(at) = text.windows(comment.len()).rposition(|window| window == comment) else { return Checksum::Missing };
    let (before, rest) = text.split_at(at);
    let wanted = format!("{COMMENT}{:016x}\n", crc64(0, before));
    if rest == wanted.as_bytes() { Checksum::Right } else { Checksum::Wrong }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_changed_byte_of_a_list_is_found_and_servers_skip_the_checksum() {
        let list = List::parse(b"file a.1.base.rdb seq 1 type b\nfile a.1.incr.aof seq 1 type i\n").unwrap();
        let text = checked_list(&list);
        assert_eq!((check(text.as_bytes()), List::parse(text.as_bytes()).unwrap()), (Checksum::Right, list.clone()));
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] ^= 1;
            assert_ne!(check(&changed), Checksum::Right, "byte {at}");
        }
        assert_eq!(check(list.to_string().as_bytes()), Checksum::Missing);
    }
}
