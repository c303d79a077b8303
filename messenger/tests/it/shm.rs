//! The shared cases over shared memory: every size, cuts, a receiver that holds messages, spinning and sleeping.

use std::time::Duration;

use remora_messenger::{Address, Options, Polling};

use crate::alike;

fn somewhere(folder: &tempfile::TempDir) -> Address {
    Address::Shm(folder.path().join("bell"))
}

#[test]
fn a_question_is_answered_whatever_its_size_and_however_both_wait() {
    for polling in [Polling::Event, Polling::Adaptive(Duration::from_micros(50))] {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { polling, ..Options::default() };
        let sizes = [0, 1, 1025, 16_384, 1_048_576, 5_000_000];
        alike::a_question_is_answered(&somewhere(&folder), &options, &sizes, 200);
    }
}

#[test]
fn a_lossless_client_sends_everything_once_although_its_links_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    alike::everything_arrives_once_although_links_are_cut(&somewhere(&folder), &Options::default(), 100_000, 1000, 10);
}

#[test]
fn a_receiver_that_holds_messages_is_never_overrun() {
    let folder = tempfile::tempdir().unwrap();
    let (at, while_held) = (somewhere(&folder), Duration::from_millis(20));
    alike::a_receiver_that_holds_messages_is_never_overrun(&at, &Options::default(), 40, while_held);
}
