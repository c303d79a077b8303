//! The agents' control protocol: every message that a replica's agent and a source's agent exchange, and its layout.
//!
//! Pure: values in, bytes out, and back. Connections, time limits and queues are in the agent (`conversation`); frames,
//! seals and the handshake are the message layer's (`remora-messenger`).
//!
//! ```text
//!   replica (client)                                              source (server)
//!        │  MAGIC, Hello{versions, features, nonce}                     │
//!        ├─────────────────────────────────────────────────────────────▶│
//!        │  MAGIC, Challenge{version, versions, features, nonce, session}
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │  Proof = HMAC(token, "client", all of the above)             │   the layer's handshake: the token
//!        ├─────────────────────────────────────────────────────────────▶│   never crosses the wire, and no
//!        │  Proof = HMAC(token, "server", all of the above)             │   message before both proofs hold
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │                                                              │
//!        │  Join, Progress, HandOffQuery, StatusQuery, Leave            │   messages of the layer, in a lossy
//!        ├═════════════════════════════════════════════════════════════▶│   session: every frame bears a MAC
//!        │  Waiting, Offer, HandOffAnswer, GenerationGone, Status, …    │   over direction, sequence and
//!        │◀═════════════════════════════════════════════════════════════┤   content; pings when all is quiet
//! ```
//!
//! A replica that lends its slots ([`Relays`]) is a server in the same way, to the replicas that the source sends to
//! it: they send [`Message::ReadPeer`], and it answers with [`Message::PeerOffer`].
//!
//! A message is one message of the layer: its tag is the kind, its fields are the front, one after the other in the
//! order in which their `record!` lists them. Every list, name and text has a bound ([`bounds`]). A receiver treats an
//! unknown kind as the mark of a newer peer; a payload that ends early or late is malformed.
//! `protocol/README.md` describes every byte, and what the protocol protects against and what not.
//!
//! Messages never carry slots or journal bytes. The only secret in one is the key of a sealed table in an offer, which
//! only a connection with TLS carries. A region key says where memory is; reading it takes a secret
//! that both ends derive from the session's key ([`remora_wire::derive()`]).
//!
//! # Versions, newest first
//!
//! - 7: Expected says how long a snapshot will be, and a status report when it will be whole, or that the source still
//!   prepares its memory; an offer says why no
//!   snapshot of the source's server can be taken now, and so does a cause of waiting; an offer names the history that
//!   its own continues, the source's process, and what a snapshot would be. A standby says that it is one, and readers
//!   are told where standbys serve.
//! - 6: status says what the source's upload in the background does; an offer says whether slots may be compressed, and
//!   a status report how they are.
//! - 5: progress and status say why a server does not use fast keys.
//! - 4: an offer has the keys of sealed tables; a status report says what protects the data of each replica.
//! - 3: Waiting says its cause in a code; fields that no receiver read are gone.
//! - 2: on the message layer. Heartbeat is gone, as the layer pings.
//! - 1: the same messages in frames of their own.
//!
//! # Modules
//!
//! - [`message`]: the messages and what they carry, in the order of a sync. **Start here.**
//! - [`sweep`]: what a server's module sends during a sweep.
//! - [`bounds`]: versions, the limit of every field, how a replication id is encoded, and the version of the commands
//!   between agents and module.

#![forbid(unsafe_code)]

mod base;
pub mod bounds;
pub mod message;
pub mod sweep;

pub use base::{Base, BaseKind};
pub use bounds::{MODULE_PROTOCOL, *};
pub use message::{
    Advance, Announce, Basis, DecodeError, Expected, Former, GenerationState, GenerationStatus, Join, Length,
    LossCause, Message, Offer, Outcome, Phase, Progress, RefusalCode, Relaying, Relays, ReplicaStatus, Resume, Saving,
    Side, StatusReport, TableOffer, Terms, Totals, UploadStatus, Upstream, WaitCause,
};

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing {
    //! The body of the fuzz target, which `cargo test` runs on every seed: any bytes must end in a value or an error,
    //! never in a panic or an endless loop.

    use crate::Message;

    /// Decodes a message: the first byte is its tag, the others are its payload. What decodes must encode to the same
    /// bytes.
    pub fn message(bytes: &[u8]) {
        let Some((&tag, payload)) = bytes.split_first() else {
            return;
        };
        let Ok(message) = Message::decode(tag, payload) else {
            return;
        };
        let mut again = Vec::new();
        assert_eq!(message.encode(&mut again), Ok(tag));
        assert_eq!(again, payload, "two encodings of {}", message.name());
    }

    #[cfg(test)]
    mod tests {
        #![allow(clippy::unwrap_used)]

        use super::*;
        use std::fs;
        use std::path::Path;

        /// The seeds by name, in a fixed order.
        fn seeds() -> Vec<(String, Vec<u8>)> {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/protocol_message");
            let seed =
                |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
            let mut seeds: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| seed(entry.unwrap())).collect();
            seeds.sort();
            seeds
        }

        #[test]
        fn every_seed_holds() {
            for (name, bytes) in seeds() {
                println!("{name}"); // shown only when the body panics
                message(&bytes);
            }
        }

        /// Seeds that are refused at their first field would exercise little: each kind of message is there, under its
        /// name.
        #[test]
        fn the_seeds_hold_every_kind_of_message() {
            let decoded = |(name, bytes): &(String, Vec<u8>)| {
                let (tag, payload) = bytes.split_first()?;
                let message = Message::decode(*tag, payload).ok()?;
                assert_eq!(message.name().to_lowercase(), name.replace('-', ""));
                Some(message.tag())
            };
            assert_eq!(seeds().iter().filter_map(decoded).count(), 20);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Every message survives encoding and decoding, and bytes that are not a message are refused.
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::fuzzing;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use remora_redis::ReplId;
    use remora_wire::{Malformed, TooLarge};

    /// Text that arrives as it was sent: without control characters, and without separators of lines and paragraphs.
    fn names() -> impl Strategy<Value = String> {
        "[^\\p{C}\\p{Zl}\\p{Zp}]{0,30}"
    }

    fn replids() -> impl Strategy<Value = ReplId> {
        "[0-9a-f]{40}".prop_map(|text| text.parse().unwrap())
    }

    fn resumes() -> impl Strategy<Value = Resume> {
        (any::<[u64; 3]>(), any::<bool>(), replids()).prop_map(
            |([generation, held_slots, next_byte], loaded, replid)| Resume {
                generation,
                held_slots,
                loaded,
                replid,
                next_byte,
            },
        )
    }

    fn relays() -> impl Strategy<Value = Relays> {
        names().prop_map(|serves_at| Relays { serves_at })
    }

    fn upstreams() -> impl Strategy<Value = Upstream> {
        (any::<u64>(), names(), names()).prop_map(|(session, name, address)| Upstream { session, name, address })
    }

    fn relaying() -> impl Strategy<Value = Relaying> {
        (any::<Option<u64>>(), any::<[u64; 2]>(), any::<bool>())
            .prop_map(|(reads_from, [oldest, held], is_full)| Relaying { reads_from, oldest, held, is_full })
    }

    fn joins() -> impl Strategy<Value = Message> {
        (names(), names(), option::of(resumes()), any::<bool>(), "[a-z]{0,32}", option::of(relays())).prop_map(
            |(name, server, resume, plan_only, zone, relays)| {
                Message::Join(Join { name, server, resume, plan_only, zone, relays })
            },
        )
    }

    fn phases() -> impl Strategy<Value = Phase> {
        use Phase::*;
        prop::sample::select(vec![Waiting, Transfer, Load, CatchUp, HandOff, Stay, Done])
    }

    fn progress() -> impl Strategy<Value = Message> {
        (any::<[u64; 5]>(), phases(), any::<Option<u8>>(), [names(), names()], option::of(relaying())).prop_map(
            |(numbers, phase, transport, [transport_why, no_fast_keys], relaying)| {
                let [generation, slots_below, slots_held, bytes, applied_offset] = numbers;
                Message::Progress(Progress {
                    generation,
                    phase,
                    transport,
                    transport_why,
                    no_fast_keys,
                    slots_below,
                    slots_held,
                    bytes,
                    applied_offset,
                    relaying,
                })
            },
        )
    }

    fn tables() -> impl Strategy<Value = TableOffer> {
        let keys = vec(vec(any::<u8>(), 0..50), 0..=MAX_KEYS);
        let numbers = (any::<[u64; 2]>(), any::<[u32; 2]>(), any::<[bool; 2]>());
        let seal = vec(any::<u8>(), 0..=MAX_SEAL_BYTES);
        (numbers, keys, seal).prop_map(|((offsets, [slot_size, slots], [retained, compressed]), keys, seal)| {
            let [generation, first_offset] = offsets;
            TableOffer { generation, first_offset, slot_size, slots, retained, keys, seal, compressed }
        })
    }

    fn announces() -> impl Strategy<Value = Announce> {
        (names(), any::<u16>(), any::<bool>(), names()).prop_map(|(host, port, tls, source_sees_as)| Announce {
            host,
            port,
            tls,
            source_sees_as,
        })
    }

    fn bases() -> impl Strategy<Value = Base> {
        let kinds = prop_oneof![
            Just(BaseKind::Snapshot),
            Just(BaseKind::Copy),
            Just(BaseKind::Backup),
            Just(BaseKind::File),
            Just(BaseKind::Sweep),
            Just(BaseKind::Fork),
            Just(BaseKind::None),
        ];
        (kinds, names(), any::<[u64; 2]>(), names()).prop_map(
            |(kind, place, [age_seconds, stream_bytes], passed_over)| Base {
                kind,
                place,
                age_seconds,
                stream_bytes,
                passed_over,
            },
        )
    }

    fn terms() -> impl Strategy<Value = Terms> {
        (any::<([u64; 3], [bool; 7])>(), bases()).prop_map(
            |(([snapshot_bytes, ring_bytes, fork_delay_seconds], flags), base)| {
                let [windowed, held, sealed, tunes_server, is_refused, offers_shm, offers_verbs] = flags;
                Terms {
                    snapshot_bytes,
                    ring_bytes,
                    windowed,
                    held,
                    sealed,
                    fork_delay_seconds,
                    tunes_server,
                    is_refused,
                    offers_shm,
                    offers_verbs,
                    base,
                }
            },
        )
    }

    fn offers() -> impl Strategy<Value = Message> {
        let formers = (replids(), any::<u64>()).prop_map(|(replid, end)| Former { replid, end });
        let rest =
            (names(), names(), option::of(upstreams()), names(), names(), (option::of(formers), option::of(terms())));
        (any::<[u64; 5]>(), option::of(replids()), tables(), tables(), announces(), rest).prop_map(
            |(numbers, replid, snapshot, journal, primary, (server, run_id, upstream, warning, obstacle, rest))| {
                let (former, terms) = rest;
                let [generation, offset, process, backlog_bytes, write_rate] = numbers;
                Message::Offer(Offer {
                    generation,
                    replid,
                    former,
                    offset,
                    snapshot,
                    journal,
                    primary,
                    server,
                    run_id,
                    process,
                    backlog_bytes,
                    write_rate,
                    upstream,
                    warning,
                    obstacle,
                    terms,
                })
            },
        )
    }

    fn advances() -> impl Strategy<Value = Advance> {
        any::<(Option<u16>, u64, Option<u64>)>().prop_map(|(percent_permille, rate_bytes_per_s, left_seconds)| {
            Advance { percent_permille, rate_bytes_per_s, left_seconds }
        })
    }

    fn lengths() -> impl Strategy<Value = Length> {
        use Basis::*;
        let bases = prop::sample::select(vec![Unknown, Memory, Former, Keys, Known]);
        (any::<u64>(), bases).prop_map(|(bytes, basis)| Length { bytes, basis })
    }

    fn savings() -> impl Strategy<Value = Saving> {
        any::<(u64, u64)>().prop_map(|(keys, keys_total)| Saving { keys, keys_total })
    }

    fn replicas() -> impl Strategy<Value = ReplicaStatus> {
        let relay = (any::<[u64; 2]>(), any::<Option<u64>>(), any::<bool>(), "[a-z]{0,32}");
        (
            names(),
            names(),
            ("[a-z]{0,16}", names(), names(), "[a-z]{0,32}"),
            phases(),
            any::<[u64; 5]>(),
            advances(),
            relay,
        )
            .prop_map(
                |(
                    name,
                    address,
                    (transport, transport_why, no_fast_keys, protection),
                    phase,
                    numbers,
                    advance,
                    relay,
                )| {
                    let [slots_held, journal_lag_bytes, applied_offset, joined_seconds, silent_seconds] = numbers;
                    let ([session, oldest_slot], reads_from, serves, zone) = relay;
                    ReplicaStatus {
                        name,
                        address,
                        transport,
                        transport_why,
                        no_fast_keys,
                        protection,
                        phase,
                        slots_held,
                        advance,
                        journal_lag_bytes,
                        applied_offset,
                        joined_seconds,
                        silent_seconds,
                        session,
                        reads_from,
                        serves,
                        oldest_slot,
                        zone,
                    }
                },
            )
    }

    fn generations() -> impl Strategy<Value = GenerationStatus> {
        use GenerationState::*;
        let state = prop::sample::select(vec![Capturing, Complete]);
        let numbers = any::<[u64; 14]>();
        let ahead = (lengths(), advances());
        (numbers, replids(), state, any::<bool>(), [names(), names(), names()], ahead).prop_map(
            |(n, replid, state, windowed, texts, (length, advance))| {
                let [capture, no_fast_keys, compression] = texts;
                GenerationStatus {
                    generation: n[0],
                    replid,
                    offset_start: n[1],
                    offset_now: n[2],
                    state,
                    snapshot_bytes: n[3],
                    length,
                    advance,
                    slots: n[4],
                    published_slots: n[5],
                    retired_slots: n[6],
                    windowed,
                    memory_bytes: n[7],
                    memory_limit: n[8],
                    age_seconds: n[9],
                    journal_first: n[10],
                    journal_end: n[11],
                    capture_millis: n[12],
                    capture,
                    no_fast_keys,
                    stored_bytes: n[13],
                    compression,
                }
            },
        )
    }

    fn statuses() -> impl Strategy<Value = Message> {
        let texts = (names(), names(), names(), names(), names());
        let uploads = any::<(u64, u64, bool)>().prop_map(|(bytes_per_second, queueing_micros, yields)| UploadStatus {
            bytes_per_second,
            queueing_micros,
            yields,
        });
        let snapshots = (option::of(generations()), bases(), option::of(savings()));
        (texts, snapshots, vec(replicas(), 0..4), any::<[u64; 5]>(), option::of(uploads)).prop_map(
            |(
                (source, server, role, preparing, last_failure),
                (generation, base, saving),
                replicas,
                numbers,
                upload,
            )| {
                let [snapshots_taken, snapshots_failed, forks, replicas_done, bytes_served] = numbers;
                let totals = Totals { snapshots_taken, snapshots_failed, forks, replicas_done, bytes_served };
                Message::Status(StatusReport {
                    source,
                    server,
                    role,
                    generation,
                    base,
                    preparing,
                    saving,
                    replicas,
                    totals,
                    last_failure,
                    upload,
                })
            },
        )
    }

    fn small_ones() -> impl Strategy<Value = Message> {
        use {Outcome::*, RefusalCode::*};
        let outcomes = prop::sample::select(vec![HandedOver, Stopped, Failed]);
        let causes =
            prop::sample::select(vec![LossCause::Gone, LossCause::Lied, LossCause::Passed, LossCause::Refused]);
        let waits =
            vec![WaitCause::NotYet, WaitCause::Busy, WaitCause::LastAttemptFailed, WaitCause::CutOff, WaitCause::Turn];
        let waits = prop::sample::select(waits);
        let refusals = prop::sample::select(vec![
            RefusalCode::Busy,
            RefusalCode::Stopping,
            Stalled,
            PrimaryRefuses,
            HistoryGone,
            NotPermitted,
        ]);
        prop_oneof![
            Just(Message::StatusQuery),
            Just(Message::ProbeQuery),
            vec(vec(any::<u8>(), 0..50), 0..=MAX_KEYS).prop_map(|keys| Message::ProbeOffer { keys }),
            (any::<u64>(), lengths(), option::of(savings())).prop_map(|(generation, length, saving)| {
                Message::Expected(Expected { generation, length, saving })
            }),
            any::<(u64, u64)>().prop_map(|(generation, offset)| Message::HandOffQuery { generation, offset }),
            (outcomes, names()).prop_map(|(outcome, text)| Message::Leave { outcome, text }),
            (waits, names()).prop_map(|(cause, text)| Message::Waiting { cause, text }),
            (any::<bool>(), names()).prop_map(|(covered, text)| Message::HandOffAnswer { covered, text }),
            (any::<u64>(), names()).prop_map(|(generation, text)| Message::GenerationGone { generation, text }),
            (refusals, names()).prop_map(|(code, text)| Message::Refused { code, text }),
            (any::<[u64; 2]>(), causes, names()).prop_map(|([generation, session], cause, text)| Message::PeerLost {
                generation,
                session,
                cause,
                text
            }),
            (any::<u64>(), names()).prop_map(|(generation, name)| Message::ReadPeer { generation, name }),
            (any::<u64>(), option::of(upstreams()))
                .prop_map(|(generation, upstream)| Message::ReadFrom { generation, upstream }),
            (any::<[u64; 2]>(), tables()).prop_map(|([generation, rate], table)| Message::PeerOffer {
                generation,
                table,
                rate
            }),
            names().prop_map(|serves_at| Message::StandBy { serves_at }),
            vec(names(), 0..=MAX_STANDBYS).prop_map(|addresses| Message::Standbys { addresses }),
        ]
    }

    fn messages() -> impl Strategy<Value = Message> {
        prop_oneof![small_ones(), joins(), progress(), offers(), statuses()]
    }

    fn encoded(message: &Message) -> (u8, Vec<u8>) {
        let mut payload = Vec::new();
        let tag = message.encode(&mut payload).unwrap();
        (tag, payload)
    }

    fn replica() -> ReplicaStatus {
        ReplicaStatus {
            name: "n".repeat(MAX_NAME_BYTES),
            address: "a".repeat(MAX_ADDRESS_BYTES),
            transport: "t".repeat(16),
            transport_why: "w".repeat(MAX_WHY_BYTES),
            no_fast_keys: "f".repeat(MAX_WHY_BYTES),
            protection: "p".repeat(MAX_PROTECTION_BYTES),
            phase: Phase::Stay,
            slots_held: 0,
            advance: Advance { percent_permille: Some(1000), rate_bytes_per_s: 0, left_seconds: Some(0) },
            journal_lag_bytes: 0,
            applied_offset: 0,
            joined_seconds: 0,
            silent_seconds: 0,
            session: 0,
            reads_from: Some(0),
            serves: true,
            oldest_slot: 0,
            zone: "z".repeat(MAX_ZONE_BYTES),
        }
    }

    fn status(replicas: Vec<ReplicaStatus>) -> Message {
        Message::Status(StatusReport {
            source: String::new(),
            server: String::new(),
            role: String::new(),
            generation: None,
            base: Base::default(),
            preparing: String::new(),
            saving: None,
            replicas,
            totals: Totals::default(),
            last_failure: String::new(),
            upload: Some(UploadStatus { bytes_per_second: 1 << 20, queueing_micros: 500, yields: true }),
        })
    }

    proptest! {
        #[test]
        fn every_message_arrives_as_it_was_sent(message in messages()) {
            let (tag, payload) = encoded(&message);
            prop_assert_eq!(Message::decode(tag, &payload).unwrap(), message);
        }

        #[test]
        fn a_message_cut_short_anywhere_or_too_long_is_refused(message in messages()) {
            let (tag, mut payload) = encoded(&message);
            for length in 0..payload.len() {
                let outcome = Message::decode(tag, &payload[..length]);
                prop_assert!(matches!(outcome, Err(DecodeError::Malformed(_))), "{} of {} bytes", length, payload.len());
            }
            payload.push(0);
            let outcome = Message::decode(tag, &payload);
            let refused = matches!(outcome, Err(DecodeError::Malformed(Malformed::Trailing { extra: 1 })));
            prop_assert!(refused, "one byte more");
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(tag in 0x10u8..0x4c, payload in vec(any::<u8>(), 0..300)) {
            fuzzing::message(&[&[tag][..], &payload].concat());
        }

        #[test]
        fn a_damaged_message_is_a_message_or_an_error(message in messages(), at in any::<prop::sample::Index>(), change: u8) {
            let (tag, mut bytes) = encoded(&message);
            bytes.insert(0, tag);
            let at = at.index(bytes.len());
            bytes[at] ^= change;
            fuzzing::message(&bytes);
        }
    }

    #[test]
    fn the_longest_status_fits_into_a_frame_and_a_longer_one_is_refused_here() {
        let (_, payload) = encoded(&status(vec![replica(); MAX_REPLICAS]));
        assert!(payload.len() <= MAX_PAYLOAD_BYTES as usize);
        let outcome = status(vec![replica(); MAX_REPLICAS + 1]).encode(&mut Vec::new());
        assert_eq!(outcome, Err(TooLarge { count: MAX_REPLICAS + 1, limit: MAX_REPLICAS }));
    }

    #[test]
    fn a_kind_that_we_do_not_know_means_that_the_peer_is_newer() {
        let fault = Message::decode(0x7f, b"").unwrap_err();
        assert!(matches!(fault, DecodeError::UnknownMessage { tag: 0x7f }));
        assert!(fault.to_string().contains("the peer is newer"), "{fault}");
    }

    #[test]
    fn an_announced_list_takes_memory_only_as_its_items_arrive() {
        let (tag, mut payload) = encoded(&status(Vec::new()));
        // Behind the count: the totals, the length of an empty text, and the upload after its presence.
        let count_at = payload.len() - 2 - 5 * 8 - 2 - (1 + 8 + 8 + 1);
        payload[count_at..count_at + 2].copy_from_slice(&(MAX_REPLICAS as u16).to_le_bytes());
        assert!(matches!(Message::decode(tag, &payload), Err(DecodeError::Malformed(_))));
        payload[count_at..count_at + 2].copy_from_slice(&(MAX_REPLICAS as u16 + 1).to_le_bytes());
        let outcome = Message::decode(tag, &payload);
        assert!(matches!(outcome, Err(DecodeError::Malformed(Malformed::Excess { count: 1025, limit: 1024 }))));
    }

    #[test]
    fn a_long_explanation_is_cut_rather_than_refused() {
        let text = "é".repeat(MAX_TEXT_BYTES);
        let (tag, payload) = encoded(&Message::GenerationGone { generation: 1, text });
        let Message::GenerationGone { text, .. } = Message::decode(tag, &payload).unwrap() else {
            panic!("another message");
        };
        assert_eq!(text, "é".repeat(MAX_TEXT_BYTES / 2));
    }

    #[test]
    fn each_side_may_send_only_its_own_messages() {
        for (message, client, server) in [
            (Message::StatusQuery, true, false),
            (Message::ProbeQuery, true, false),
            (Message::ProbeOffer { keys: Vec::new() }, false, true),
            (Message::HandOffQuery { generation: 0, offset: 0 }, true, false),
            (status(Vec::new()), false, true),
            (Message::Waiting { cause: WaitCause::NotYet, text: String::new() }, false, true),
            (Message::ReadPeer { generation: 0, name: String::new() }, true, false),
            (Message::ReadFrom { generation: 0, upstream: None }, false, true),
            (Message::Expected(Expected::default()), false, true),
            (Message::StandBy { serves_at: String::new() }, true, false),
            (Message::Standbys { addresses: Vec::new() }, false, true),
        ] {
            assert_eq!(message.may_come_from(Side::Client), client, "{}", message.name());
            assert_eq!(message.may_come_from(Side::Server), server, "{}", message.name());
        }
    }

    /// One message byte by byte, so that the layout cannot change unnoticed.
    #[test]
    fn the_layout_of_a_join_is_the_one_written_down() {
        let join = Join {
            name: "b".to_owned(),
            server: "valkey 9".to_owned(),
            resume: Some(Resume {
                generation: 3,
                held_slots: 0x0102,
                loaded: true,
                replid: "a".repeat(40).parse().unwrap(),
                next_byte: 9,
            }),
            plan_only: false,
            zone: "east".to_owned(),
            relays: Some(Relays { serves_at: "h:1".to_owned() }),
        };
        let mut wire = b"\x01\x00b\x08\x00valkey 9\x01\x03\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0\x01".to_vec();
        wire.extend_from_slice(&[b'a'; 40]);
        wire.extend_from_slice(b"\x09\0\0\0\0\0\0\0\0\x04\0east\x01\x03\0h:1");
        assert_eq!(encoded(&Message::Join(join)), (0x20, wire));
    }

    /// A replication id travels as its digits, and nothing else is taken for one.
    #[test]
    fn only_forty_digits_in_lower_case_are_a_replid() {
        let resume = |digits: &[u8]| {
            let mut wire = b"\0\0\0\0\x01\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x01".to_vec();
            wire.extend_from_slice(digits);
            wire.extend_from_slice(b"\x09\0\0\0\0\0\0\0\0\0\0\0");
            Message::decode(0x20, &wire)
        };
        assert!(resume(&[b'a'; 40]).is_ok());
        for wrong in [[b'A'; 40], [b'g'; 40], [0; 40]] {
            let refused = DecodeError::Malformed(Malformed::Invalid { what: "replid" });
            assert_eq!(resume(&wrong), Err(refused), "{wrong:?}");
        }
    }
}
