//! Every way to cut a small conversation: whatever pieces the kernel delivers, the snapshot ends at its last byte, and
//! the journal begins with the byte behind it.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use remora_redis::psync::client::{Channel, Options};
use remora_table::State;

use super::pieces::Pieces;
use super::plan::CaptureError;
use super::psync_link::Opening;
use super::scripted::{HISTORY, MARK, Rig, content, history};
use super::socket::Socket;
use super::stream::{Follower, Following};

/// What the server sends before its snapshot.
fn promise() -> Vec<u8> {
    format!("+PONG\r\n+OK\r\n\n+FULLRESYNC {HISTORY} 77\r\n\n\n").into_bytes()
}

/// The stream: commands of different lengths.
fn stream() -> Vec<u8> {
    b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*2\r\n$4\r\nINCR\r\n$3\r\naaa\r\n*1\r\n$4\r\nPING\r\n".to_vec()
}

/// Plays the conversation in these pieces. The capture must hold this payload and this stream then, and nothing else.
#[track_caller]
fn plays(rig: &mut Rig, pieces: &[&[u8]], payload: &[u8], stream: &[u8]) {
    let wire = Pieces::default();
    pieces.iter().for_each(|piece| wire.add(piece));
    wire.end();
    rig.renew();
    let capture = &rig.capture;
    let mut link = capture.handshake_over(Socket::of_pieces(wire), Options::default());
    let Opening::Full { replid, offset, payload: form } = link.opening().unwrap() else { panic!("another opening") };
    assert_eq!((replid, offset), (history(), 77));
    let following = capture.take_announced(link.announced(replid, offset, form)).unwrap();
    let Following::ThisThread(follower) = following else { panic!("another thread follows") };
    is_exact(rig, follower, payload, stream);
}

/// Follows the stream to its end. The tables hold this payload and this stream then.
#[track_caller]
fn is_exact(rig: &mut Rig, mut follower: Box<Follower>, payload: &[u8], stream: &[u8]) {
    let Err(end) = follower.pour();
    assert!(matches!(end, CaptureError::Link { .. }), "{end}");
    let length = payload.len();
    assert_eq!(rig.snapshot_state(), (State::Sealed, Some(length as u64)));
    assert!(rig.snapshot_bytes(length) == payload, "the snapshot has other bytes");
    assert_eq!(rig.capture.plan.gauge.journal(), (78, 77 + stream.len() as u64), "the journal has another length");
    assert!(rig.journal_bytes(stream.len()) == stream, "the journal has other bytes");
    assert_eq!(rig.reported(), ["started at 77".to_owned(), format!("completed with {length} bytes")]);
}

/// The sizes of payloads to try: none, some, as many as a slot holds, and more.
const LENGTHS: [usize; 4] = [0, 9, 60, 4_100];

#[test]
fn a_snapshot_of_known_length_and_its_stream_are_exact_wherever_they_are_cut() {
    let mut rig = Rig::new();
    for length in LENGTHS {
        let (payload, stream) = (content(length), stream());
        let all = [&promise(), format!("${length}\r\n").as_bytes(), &payload, &stream].concat();
        // In one piece, byte by byte, and in two pieces at each place.
        plays(&mut rig, &[&all], &payload, &stream);
        let places = (0..all.len()).filter(|&at| at < 200 || all.len() - at < 200);
        for (first, second) in places.map(|at| all.split_at(at)) {
            plays(&mut rig, &[first, second], &payload, &stream);
        }
        if length < 100 {
            plays(&mut rig, &all.chunks(1).collect::<Vec<_>>(), &payload, &stream);
        }
    }
}

/// The server waits for an acknowledgement behind the mark, so a read that ends with the mark is followed by the stream
/// in another read. Everything before is cut everywhere.
#[test]
fn a_snapshot_that_ends_with_a_mark_and_its_stream_are_exact_wherever_they_are_cut() {
    let mut rig = Rig::new();
    for length in LENGTHS {
        let (payload, stream) = (content(length), stream());
        let all = [&promise(), format!("$EOF:{MARK}\r\n").as_bytes(), &payload, MARK.as_bytes()].concat();
        plays(&mut rig, &[&all, &stream], &payload, &stream);
        let places = (0..all.len()).filter(|&at| at < 250 || all.len() - at < 100);
        for (first, second) in places.map(|at| all.split_at(at)) {
            plays(&mut rig, &[first, second, &stream], &payload, &stream);
        }
        for (first, second) in (0..stream.len()).map(|at| stream.split_at(at)) {
            plays(&mut rig, &[&all, first, second], &payload, &stream);
        }
        if length < 100 {
            let pieces: Vec<&[u8]> = all.chunks(1).chain(stream.chunks(1)).collect();
            plays(&mut rig, &pieces, &payload, &stream);
        }
    }
}

/// What a server answers to `PSYNC <replid> <offset>`, and the bytes of the stream behind it.
#[test]
fn a_stream_that_is_resumed_is_exact_wherever_it_is_cut() {
    let mut rig = Rig::new();
    let (payload, stream) = (content(9), stream());
    let begun = [&promise(), b"$9\r\n".as_slice(), &payload, &stream].concat();
    let resumed = [b"+PONG\r\n+OK\r\n\n+CONTINUE\r\n".as_slice(), &stream].concat();
    let twice = stream.repeat(2);
    for (first, second) in (0..resumed.len()).map(|at| resumed.split_at(at)) {
        rig.renew();
        let [before, after] = [Pieces::default(), Pieces::default()];
        before.add(&begun);
        [first, second].into_iter().for_each(|piece| after.add(piece));
        [&before, &after].into_iter().for_each(Pieces::end);
        let capture = &rig.capture;
        let mut link = capture.handshake_over(Socket::of_pieces(before), Options::default());
        let Opening::Full { replid, offset, payload: form } = link.opening().unwrap() else {
            panic!("another opening")
        };
        let following = capture.take_announced(link.announced(replid, offset, form)).unwrap();
        let Following::ThisThread(mut follower) = following else { panic!("another thread follows") };
        let Err(_) = follower.pour();
        let link = capture.handshake_over(Socket::of_pieces(after), follower.options(history()));
        follower.resume_over(link, history()).unwrap();
        is_exact(&mut rig, follower, &payload, &twice);
    }
}

/// Two connections: the snapshot's ends with its mark, and the stream's goes on behind a first handshake.
#[test]
fn a_stream_beside_its_snapshot_is_exact_wherever_it_is_cut() {
    let mut rig = Rig::new();
    let stream = stream();
    let all = [b"+PONG\r\n+OK\r\n+DUALCHANNELSYNC\r\n+OK\r\n+CONTINUE\r\n".as_slice(), &stream].concat();
    for (first, second) in (0..all.len()).map(|at| all.split_at(at)) {
        rig.renew();
        let wire = Pieces::default();
        [first, second].into_iter().for_each(|piece| wire.add(piece));
        wire.end();
        let options = |channel| Options { channel, ..Options::default() };
        let mut link = rig.capture.handshake_over(Socket::of_pieces(wire), options(Channel::WholeOrStream));
        assert_eq!(link.opening().unwrap(), Opening::TwoChannels);
        let attach = Channel::Stream { snapshot_client: 12 };
        let mut link = link.again(Options { resume: Some((history(), 78)), ..options(attach) });
        assert_eq!(link.continued().unwrap(), Some(history()));
        assert_eq!(rig.rest_of(link.into_socket()), stream, "cut at {}", first.len());
    }
}

/// `repl-ping-replica-period` may be longer than the silence that a capture accepts.
#[test]
fn a_primary_that_has_written_nothing_more_may_be_silent() {
    let (stream, payload) = (stream(), content(9));
    let end = 77 + stream.len() as u64;
    for (said, is_kept) in [(None, false), (Some(end + 1), false), (Some(end), true)] {
        let mut rig = Rig::new();
        rig.capture.silence_limit = Duration::from_millis(100);
        rig.renew();
        let wire = Pieces::default();
        wire.add(&[promise().as_slice(), b"$9\r\n", &payload, &stream].concat());
        let mut link = rig.capture.handshake_over(Socket::of_pieces(wire), Options::default());
        let Opening::Full { replid, offset, payload: form } = link.opening().unwrap() else {
            panic!("another opening")
        };
        let following = rig.capture.take_announced(link.announced(replid, offset, form)).unwrap();
        let Following::ThisThread(mut follower) = following else { panic!("another thread follows") };
        let note = || said.iter().for_each(|&offset| rig.capture.plan.presence.note_offset(Instant::now(), offset));
        note();
        let began = Instant::now();
        let why = std::thread::scope(|scope| {
            // The source's loop asks again and again, for several times the longest silence.
            scope.spawn(|| {
                while is_kept && began.elapsed() < rig.capture.silence_limit * 5 {
                    std::thread::sleep(rig.capture.silence_limit / 10);
                    note();
                }
                if is_kept {
                    rig.stop();
                }
            });
            let Err(why) = follower.pour();
            why
        });
        assert_eq!(matches!(why, CaptureError::Stopped), is_kept, "{said:?}: {why}");
    }
}
