//! Who may read: which sessions may read which regions of an exporter, the proofs that a data connection belongs to a
//! session, which connections may wait for their proof, and the handshake in which they prove it. Pure: the caller
//! hands the time in, and closes connections. Every transport asks here when it admits a connection, which reads one
//! region.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use remora_wire::token;

use crate::error::{Denial, Error};
use crate::memory;
use crate::region::{RegionId, Secret};

pub use remora_wire::token::PROOF_BYTES;

/// The regions that a session may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Regions {
    /// Each region that is exported now or later.
    All,
    /// These.
    Only(BTreeSet<RegionId>),
}

impl Regions {
    /// These regions and no others.
    pub fn only(regions: impl IntoIterator<Item = RegionId>) -> Regions {
        Regions::Only(regions.into_iter().collect())
    }

    /// Whether this region is one of them.
    pub fn cover(&self, id: RegionId) -> bool {
        match self {
            Regions::All => true,
            Regions::Only(regions) => regions.contains(&id),
        }
    }
}

/// The grants of an exporter: at most one for each session.
#[derive(Debug, Default)]
pub(crate) struct Grants(HashMap<u64, Grant>);

#[derive(Debug)]
struct Grant {
    secret: Secret,
    regions: Regions,
}

impl Grants {
    /// Replaces the session's grant. Returns which of the session's connections the new one would not admit, by their
    /// region: the caller closes them.
    pub(crate) fn insert(
        &mut self,
        session: u64,
        secret: Secret,
        regions: Regions,
    ) -> impl Fn(RegionId) -> bool + use<> {
        let before = self.0.insert(session, Grant { secret, regions: regions.clone() });
        let is_other_secret = before.is_some_and(|before| before.secret != secret);
        move |id| is_other_secret || !regions.cover(id)
    }

    /// Ends the session's grant. The caller closes its connections.
    pub(crate) fn remove(&mut self, session: u64) {
        self.0.remove(&session);
    }

    /// The secret that the session must prove.
    pub(crate) fn secret(&self, session: u64) -> Option<&Secret> {
        self.0.get(&session).map(|grant| &grant.secret)
    }

    /// Whether the session, which has proved its secret, may read this region. Asked before it is told whether the
    /// region exists.
    ///
    /// # Errors
    /// [`Denial::Stale`] if it may read the region of another generation, [`Denial::NotGranted`] otherwise.
    pub(crate) fn permit(&self, session: u64, id: RegionId) -> Result<(), Denial> {
        match self.0.get(&session).map(|grant| &grant.regions) {
            Some(regions) if regions.cover(id) => Ok(()),
            Some(Regions::Only(regions)) if regions.iter().any(|other| other.region == id.region) => Err(Denial::Stale),
            _ => Err(Denial::NotGranted),
        }
    }
}

// Proofs and nonces of data connections: a keyed hash over a transcript. No I/O; the machine of the handshake (below)
// says which messages are exchanged.
//
// The secret is never sent. Each proof is made under a label that says which end signs.

/// Bytes of a nonce: as many as the hash has, so that nonces do not repeat.
pub const NONCE_BYTES: usize = 32;

/// HMAC over `label` and `transcript`, keyed by `secret`: proves knowledge of the secret and of the transcript. `label`
/// says which end signs.
pub fn prove(secret: &Secret, label: &[u8], transcript: &[u8]) -> [u8; PROOF_BYTES] {
    token::proof(secret, &[&length_of(label), label, transcript])
}

/// Whether [`prove`] makes `proof` of the same secret, label and transcript. Takes constant time.
#[must_use]
pub fn verify(secret: &Secret, label: &[u8], transcript: &[u8], proof: &[u8; PROOF_BYTES]) -> bool {
    token::verify(secret, &[&length_of(label), label, transcript], proof)
}

/// As [`verify`], for a secret that may not exist. Then the result is `false`, after the same time as for a wrong
/// proof, so that an outsider cannot find out which sessions exist.
#[must_use]
pub fn verify_known(secret: Option<&Secret>, label: &[u8], transcript: &[u8], proof: &[u8; PROOF_BYTES]) -> bool {
    let fits = verify(secret.unwrap_or(&[0; 32]), label, transcript, proof);
    fits && secret.is_some()
}

/// A nonce: random bytes from the system.
///
/// # Errors
/// [`Error::System`] if the system provides none.
pub fn nonce() -> Result<[u8; NONCE_BYTES], Error> {
    let mut nonce = [0; NONCE_BYTES];
    memory::local::random(&mut nonce)?;
    Ok(nonce)
}

/// The length of a label, which comes first, so that no other label and transcript have the same input.
fn length_of(label: &[u8]) -> [u8; 8] {
    (label.len() as u64).to_le_bytes()
}

/// How long a connection keeps its place in any case: a proof takes two round trips, and a slow link has 50 ms for
/// each.
pub const GRACE: Duration = Duration::from_millis(100);

/// Connections that may wait for their proof, by address and in all.
#[derive(Debug)]
pub struct Admission {
    /// By number, and so by age.
    places: BTreeMap<u64, Place>,
    next: u64,
    limits: Limits,
}

/// How many connections may wait for their proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From all addresses.
    pub total: usize,
    /// From one address, or one IPv6 network of 64 bits.
    pub per_address: usize,
}

/// The answer to a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has the place of this number. If `instead` names another place, the caller closes that connection.
    Admitted {
        /// The number of the new place.
        place: u64,
        /// The place that was given up for it.
        instead: Option<u64>,
    },
    /// There is no place. A moment later there is.
    Full,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    network: Network,
    since: Instant,
}

/// An IPv4 address, or the first 64 bits of an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Network {
    V4([u8; 4]),
    V6([u8; 8]),
}

impl Network {
    fn of(address: IpAddr) -> Network {
        match address.to_canonical() {
            IpAddr::V4(address) => Network::V4(address.octets()),
            IpAddr::V6(address) => Network::V6(prefix(address)),
        }
    }
}

fn prefix(address: Ipv6Addr) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = address.octets();
    [a, b, c, d, e, f, g, h]
}

impl Admission {
    /// No connection waits.
    pub fn new(limits: Limits) -> Admission {
        Admission { places: BTreeMap::new(), next: 0, limits }
    }

    /// Finds a place for a connection from this address.
    pub fn admit(&mut self, now: Instant, peer: IpAddr) -> Verdict {
        let network = Network::of(peer);
        let instead = match self.oldest_that_must_give_way(network) {
            None => None,
            Some((number, since)) if now.saturating_duration_since(since) >= GRACE => Some(number),
            Some(_) => return Verdict::Full,
        };
        if let Some(number) = instead {
            self.places.remove(&number);
        }
        let place = self.next;
        self.next += 1;
        self.places.insert(place, Place { network, since: now });
        Verdict::Admitted { place, instead }
    }

    /// Frees a place: the connection has proved itself, or has ended. A place that was given up stays free.
    pub fn leave(&mut self, place: u64) {
        self.places.remove(&place);
    }

    /// How many connections wait.
    pub fn waiting(&self) -> usize {
        self.places.len()
    }

    /// The connection that a new one from this network replaces. `None` if there is a place for both.
    fn oldest_that_must_give_way(&self, network: Network) -> Option<(u64, Instant)> {
        let counts = self.counts();
        if counts.get(&network).is_some_and(|count| *count >= self.limits.per_address) {
            return self.oldest_of(network);
        }
        if self.places.len() < self.limits.total {
            return None;
        }
        let most = counts.values().copied().max().unwrap_or(0);
        // Of the networks with the most places, the one whose connection has waited longest.
        let crowded = counts.into_iter().filter(|(_, count)| *count == most);
        crowded.filter_map(|(network, _)| self.oldest_of(network)).min()
    }

    fn oldest_of(&self, network: Network) -> Option<(u64, Instant)> {
        let (number, place) = self.places.iter().find(|(_, place)| place.network == network)?;
        Some((*number, place.since))
    }

    fn counts(&self) -> BTreeMap<Network, usize> {
        let mut counts = BTreeMap::new();
        for place in self.places.values() {
            *counts.entry(place.network).or_default() += 1;
        }
        counts
    }
}

// The handshake of a data connection (a *lane*): one machine for all transports. No I/O, no clock, no randomness.
//
// ```text
//   reader                                                       source
//   Reader::hello   ── hello {session, region, nonce} ─────────▶ Source::challenge     or a refusal, and the end
//   Reader::prove   ◀───────────────────── challenge {nonce} ──
//                   ── HMAC(secret, READER, transcript) ───────▶ Source::examine
//   Proving::finish ◀── welcome {grant, HMAC(secret, SOURCE, transcript)} ── Proved::welcome     or a denial
// ```
//
// The transcript is hello ‖ challenge, byte for byte as they were sent. The secret never travels. Each end contributes
// a nonce, so that a recorded handshake opens nothing later. Each end signs under its own label, so that neither can
// be made to sign its own question. The source's proof is there because a reader must not take memory, or a data set,
// from an unknown process at the source's address.
//
// What the types enforce: a source tells nothing about its regions before [`Source::examine`] has accepted the proof,
// since only a [`Proved`] makes a welcome. A [`Format`] is a transport's byte layout, and the labels that its two
// proofs are made under.

/// The reader's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Number of the lane among those of its peer, from 0. For the source's log only; not part of every format.
    pub(crate) lane: u8,
    /// The session that the reader claims.
    pub(crate) session: u64,
    /// The region to read.
    pub(crate) id: RegionId,
    /// Makes the proofs of this lane unlike those of any other. A format may send fewer bytes of it.
    pub(crate) nonce: [u8; NONCE_BYTES],
}

/// Why a source answers a hello with something other than a challenge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The source has no room, or will not serve this reader.
    Denied(Denial),
    /// The hello has another version.
    Version,
    /// The hello is malformed.
    Malformed,
}

/// A transport's byte layout of the handshake.
pub(crate) trait Format {
    /// The label of the reader's proof.
    const READER: &'static [u8];
    /// The label of the source's proof.
    const SOURCE: &'static [u8];
    /// Bytes of a hello. What the transport appends to it is ignored.
    const HELLO_BYTES: usize;
    /// Bytes of a challenge. What the transport appends to it is ignored.
    const CHALLENGE_BYTES: usize;
    /// What a reader is told of the region once it is let in.
    type Grant: Copy;

    /// Encodes a hello.
    fn hello(hello: &Hello) -> Vec<u8>;
    /// Decodes a hello.
    fn parse_hello(bytes: &[u8]) -> Result<Hello, Error>;
    /// Encodes a challenge.
    fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8>;
    /// Checks a challenge; [`Error::Refused`] if it is a refusal.
    fn parse_challenge(bytes: &[u8]) -> Result<(), Error>;
    /// Encodes a refusal; `None` if this format has no message for it, and the source only hangs up.
    fn refusal(why: Refusal) -> Option<Vec<u8>>;
    /// Encodes a welcome.
    fn welcome(grant: &Self::Grant, proof: &[u8; PROOF_BYTES]) -> Vec<u8>;
    /// Encodes a denial in place of a welcome.
    fn denial(denial: Denial) -> Vec<u8>;
    /// Decodes a welcome; [`Error::Refused`] if it is a denial.
    fn parse_welcome(bytes: &[u8]) -> Result<(Self::Grant, [u8; PROOF_BYTES]), Error>;
}

/// The reader's end, which has said hello.
pub(crate) struct Reader<F> {
    transcript: Transcript,
    format: PhantomData<F>,
}

impl<F: Format> Reader<F> {
    /// Begins; the bytes are for the source.
    pub(crate) fn hello(hello: &Hello) -> (Reader<F>, Vec<u8>) {
        let bytes = F::hello(hello);
        (Reader { transcript: Transcript(bytes.clone()), format: PhantomData }, bytes)
    }

    /// Answers the source's challenge; the proof is for the source.
    ///
    /// # Errors
    /// [`Error::Refused`] if the source refuses; [`Error::Protocol`], [`Error::Version`].
    pub(crate) fn prove<'s>(
        mut self,
        challenge: &[u8],
        secret: &'s Secret,
    ) -> Result<(Proving<'s, F>, [u8; PROOF_BYTES]), Error> {
        F::parse_challenge(challenge)?;
        self.transcript.add(challenge, F::CHALLENGE_BYTES)?;
        let proof = prove(secret, F::READER, &self.transcript.0);
        Ok((Proving { transcript: self.transcript, secret, format: PhantomData }, proof))
    }
}

/// The reader's end, which has proved its session.
pub(crate) struct Proving<'s, F> {
    transcript: Transcript,
    secret: &'s Secret,
    format: PhantomData<F>,
}

impl<F: Format> Proving<'_, F> {
    /// Checks the source's proof, and returns what it tells of the region.
    ///
    /// # Errors
    /// [`Error::Refused`] if the source refuses, [`Error::Impostor`] if its proof is wrong, [`Error::Protocol`].
    pub(crate) fn finish(self, welcome: &[u8]) -> Result<F::Grant, Error> {
        let (grant, proof) = F::parse_welcome(welcome)?;
        if verify(self.secret, F::SOURCE, &self.transcript.0, &proof) { Ok(grant) } else { Err(Error::Impostor) }
    }
}

/// The source's end, which has received a hello and answered it by a challenge.
pub(crate) struct Source<F> {
    hello: Hello,
    transcript: Transcript,
    format: PhantomData<F>,
}

/// A hello that gets no challenge.
#[derive(Debug)]
pub(crate) struct Rejected {
    /// What is wrong with the hello.
    pub(crate) error: Error,
    /// The message for the reader, if there is one.
    pub(crate) answer: Option<Vec<u8>>,
}

impl<F: Format> Source<F> {
    /// Begins with a reader's hello; the bytes are for the reader. `nonce` is fresh.
    pub(crate) fn challenge(hello: &[u8], nonce: &[u8; NONCE_BYTES]) -> Result<(Source<F>, Vec<u8>), Rejected> {
        let rejected = |error: Error| {
            let why = if matches!(error, Error::Version { .. }) { Refusal::Version } else { Refusal::Malformed };
            Rejected { error, answer: F::refusal(why) }
        };
        let parsed = F::parse_hello(hello).map_err(rejected)?;
        let mut transcript = Transcript(Vec::with_capacity(F::HELLO_BYTES + F::CHALLENGE_BYTES));
        transcript.add(hello, F::HELLO_BYTES).map_err(rejected)?;
        let challenge = F::challenge(nonce);
        transcript.0.extend_from_slice(&challenge);
        Ok((Source { hello: parsed, transcript, format: PhantomData }, challenge))
    }

    /// What the reader claims. Nothing of it is proved.
    pub(crate) fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Checks the reader's proof. Without a secret (no such session) the answer is the same, and takes as long, as for
    /// a wrong proof.
    ///
    /// # Errors
    /// [`Denial::NotGranted`].
    pub(crate) fn examine<'s>(
        &self,
        proof: &[u8; PROOF_BYTES],
        secret: Option<&'s Secret>,
    ) -> Result<Proved<'_, 's, F>, Denial> {
        let fits = verify_known(secret, F::READER, &self.transcript.0, proof);
        match secret {
            Some(secret) if fits => Ok(Proved { transcript: &self.transcript, secret, format: PhantomData }),
            _ => Err(Denial::NotGranted),
        }
    }
}

/// The source's end, whose reader has proved its session.
pub(crate) struct Proved<'h, 's, F> {
    transcript: &'h Transcript,
    secret: &'s Secret,
    format: PhantomData<F>,
}

impl<F: Format> Proved<'_, '_, F> {
    /// The welcome, with the source's own proof.
    pub(crate) fn welcome(&self, grant: &F::Grant) -> Vec<u8> {
        F::welcome(grant, &prove(self.secret, F::SOURCE, &self.transcript.0))
    }
}

/// What both ends have sent so far, which is what they sign.
struct Transcript(Vec<u8>);

impl Transcript {
    /// Adds the first `length` bytes of a message, which is at least that long.
    fn add(&mut self, message: &[u8], length: usize) -> Result<(), Error> {
        let bytes = message.get(..length).ok_or(Error::Protocol("a message of the handshake is too short"))?;
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

/// For the fuzz targets: what these parsers accept survives encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_parsers<F: Format>(bytes: &[u8]) {
    if let Ok(hello) = F::parse_hello(bytes) {
        assert_eq!(F::parse_hello(&F::hello(&hello)).ok(), Some(hello));
    }
    let _ = F::parse_challenge(bytes);
    if let Ok((grant, proof)) = F::parse_welcome(bytes) {
        let wire = F::welcome(&grant, &proof);
        let again = F::parse_welcome(&wire).map(|(grant, proof)| F::welcome(&grant, &proof));
        assert_eq!(again.ok(), Some(wire));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn id(generation: u64, region: u32) -> RegionId {
        RegionId { generation, region }
    }

    #[test]
    fn a_session_may_read_what_its_last_grant_names_and_nothing_else() {
        let mut grants = Grants::default();
        assert_eq!((grants.secret(1), grants.permit(1, id(7, 0))), (None, Err(Denial::NotGranted)));
        let _ = grants.insert(1, [1; 32], Regions::only([id(7, 0), id(3, 1)]));
        let _ = grants.insert(2, [2; 32], Regions::All);
        for allowed in [id(7, 0), id(3, 1)] {
            assert_eq!(grants.permit(1, allowed), Ok(()));
        }
        assert_eq!(grants.permit(1, id(6, 0)), Err(Denial::Stale), "a key of an earlier generation");
        assert_eq!(grants.permit(1, id(7, 2)), Err(Denial::NotGranted));
        assert_eq!(grants.permit(2, id(7, 2)), Ok(()));
        let _ = grants.insert(1, [1; 32], Regions::only([id(8, 2)]));
        assert_eq!((grants.permit(1, id(7, 0)), grants.permit(1, id(8, 2))), (Err(Denial::NotGranted), Ok(())));
        grants.remove(1);
        assert_eq!(grants.permit(1, id(8, 2)), Err(Denial::NotGranted));
        assert_eq!(grants.permit(2, id(8, 2)), Ok(()));
    }

    #[test]
    fn a_new_grant_closes_the_connections_that_it_would_not_admit() {
        let mut grants = Grants::default();
        let closes = grants.insert(1, [1; 32], Regions::All);
        assert!(!closes(id(7, 0)));
        let closes = grants.insert(1, [1; 32], Regions::only([id(7, 0)]));
        assert!(!closes(id(7, 0)) && closes(id(7, 1)));
        let closes = grants.insert(1, [2; 32], Regions::only([id(7, 0)]));
        assert!(closes(id(7, 0)), "they have proved another secret");
    }

    proptest! {
        #[test]
        fn a_proof_fits_its_secret_label_and_transcript(secret: [u8; 32], label: Vec<u8>, transcript: Vec<u8>) {
            let proof = prove(&secret, &label, &transcript);
            prop_assert!(verify(&secret, &label, &transcript, &proof));
        }

        #[test]
        fn a_proof_with_one_bit_changed_anywhere_fits_no_more(secret: [u8; 32], transcript: [u8; 16], bit in 0usize..(32 + 16 + 32) * 8) {
            let mut all = Vec::new();
            all.extend_from_slice(&secret);
            all.extend_from_slice(&transcript);
            all.extend_from_slice(&prove(&secret, b"reader", &transcript));
            all[bit / 8] ^= 1 << (bit % 8);
            let secret: [u8; 32] = all[..32].try_into().unwrap();
            let proof: [u8; 32] = all[48..].try_into().unwrap();
            prop_assert!(!verify(&secret, b"reader", &all[32..48], &proof));
        }
    }

    #[test]
    fn bytes_can_not_wander_between_label_and_transcript() {
        let proof = prove(&[7; 32], b"read", b"er said");
        assert!(!verify(&[7; 32], b"reader", b" said", &proof));
    }

    #[test]
    fn without_a_secret_not_even_the_proof_of_zeros_fits() {
        let proof = prove(&[0; 32], b"reader", b"hello");
        assert!(!verify_known(None, b"reader", b"hello", &proof));
        assert!(verify_known(Some(&[0; 32]), b"reader", b"hello", &proof));
    }

    #[test]
    fn the_hash_is_hmac_sha256_as_everyone_knows_it() {
        // By `printf '\x06\0\0\0\0\0\0\0readerhello' | openssl dgst -sha256 -mac HMAC -macopt hexkey:0707…07`.
        let hex: String = prove(&[7; 32], b"reader", b"hello").iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "c65641450652fee48676893b4e7ac7b1f9fcb7d20fd9d6bb38a9f1c7c54f4a02");
    }

    #[test]
    fn no_two_nonces_are_alike() {
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }

    const LIMITS: Limits = Limits { total: 8, per_address: 3 };

    fn host(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    fn admitted(verdict: Verdict) -> Option<(u64, Option<u64>)> {
        match verdict {
            Verdict::Admitted { place, instead } => Some((place, instead)),
            Verdict::Full => None,
        }
    }

    #[test]
    fn a_flood_from_one_address_replaces_only_connections_of_that_address() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        let (other, _) = admitted(admission.admit(start, host(2))).unwrap();
        for millis in 0..1000 {
            let verdict = admission.admit(start + Duration::from_millis(millis), host(1));
            assert!(admitted(verdict).is_none_or(|(_, instead)| instead != Some(other)));
        }
        assert_eq!(admission.waiting(), 4);
        assert!(matches!(admission.admit(start, host(3)), Verdict::Admitted { instead: None, .. }));
    }

    #[test]
    fn a_connection_has_time_for_its_proof_before_it_gives_way_to_the_next() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        let places: Vec<_> = (0..3).map(|_| admitted(admission.admit(start, host(1))).unwrap().0).collect();
        assert_eq!(admission.admit(start + GRACE - Duration::from_millis(1), host(1)), Verdict::Full);
        let late = admission.admit(start + GRACE, host(1));
        assert_eq!(admitted(late).unwrap().1, Some(places[0]));
    }

    #[test]
    fn when_all_places_are_taken_the_address_with_the_most_gives_one_up() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        let silent = |admission: &mut Admission, number| admitted(admission.admit(start, host(number))).unwrap().0;
        let lone: Vec<_> = (1..=2).map(|number| silent(&mut admission, number)).collect();
        let crowd: Vec<_> = [3, 4, 3, 4, 3, 4].map(|number| silent(&mut admission, number)).into();
        let (_, instead) = admitted(admission.admit(start + GRACE, host(9))).unwrap();
        assert_eq!(instead, Some(crowd[0]));
        assert!(!lone.contains(&instead.unwrap()));
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_share_their_places() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        for number in 0..3 {
            let address: Ipv6Addr = format!("2001:db8::{number}").parse().unwrap();
            assert!(admitted(admission.admit(start, address.into())).is_some());
        }
        assert_eq!(admission.admit(start, "2001:db8::ffff".parse().unwrap()), Verdict::Full);
        assert!(admitted(admission.admit(start, "2001:db8:0:1::1".parse().unwrap())).is_some());
        // A socket for both families shows IPv4 peers as mapped addresses.
        for peer in ["::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"] {
            assert!(admitted(admission.admit(start, peer.parse().unwrap())).is_some());
        }
        assert_eq!(admission.admit(start, host(1)), Verdict::Full);
    }

    proptest! {
        #[test]
        fn places_stay_within_their_limits_and_no_connection_gives_way_early(
            steps in proptest::collection::vec((0u8..12, 0u64..60, any::<bool>()), 1..300)
        ) {
            let (mut admission, mut now) = (Admission::new(LIMITS), Instant::now());
            let mut held: BTreeMap<u64, (u8, Instant)> = BTreeMap::new();
            for (number, millis, leaves) in steps {
                now += Duration::from_millis(millis);
                if let Some(place) = held.keys().next().copied().filter(|_| leaves) {
                    admission.leave(place);
                    held.remove(&place);
                }
                if let Verdict::Admitted { place, instead } = admission.admit(now, host(number)) {
                    if let Some((_, since)) = instead.and_then(|instead| held.remove(&instead)) {
                        prop_assert!(now - since >= GRACE);
                    }
                    prop_assert!(held.insert(place, (number, now)).is_none());
                }
                prop_assert_eq!(admission.waiting(), held.len());
                prop_assert!(held.len() <= LIMITS.total);
                for host in 0..12 {
                    prop_assert!(held.values().filter(|(of, _)| *of == host).count() <= LIMITS.per_address);
                }
            }
        }
    }

    /// The smallest layout there can be: every field behind the other.
    struct Plain;

    /// The same layout under other labels.
    struct Relabelled;

    const ID: RegionId = RegionId { generation: 3, region: 1 };
    const SECRET: Secret = [7; 32];
    const NONCE: [u8; NONCE_BYTES] = [5; NONCE_BYTES];
    const HELLO: Hello = Hello { lane: 0, session: 9, id: ID, nonce: [4; NONCE_BYTES] };

    const SHORT: Error = Error::Protocol("short");

    macro_rules! plain {
        ($format:ty, $reader:literal, $source:literal) => {
            impl Format for $format {
                const READER: &'static [u8] = $reader;
                const SOURCE: &'static [u8] = $source;
                const HELLO_BYTES: usize = 41;
                const CHALLENGE_BYTES: usize = 33;
                type Grant = u64;

                fn hello(hello: &Hello) -> Vec<u8> {
                    [&[1][..], &hello.session.to_le_bytes(), &hello.nonce].concat()
                }

                fn parse_hello(bytes: &[u8]) -> Result<Hello, Error> {
                    match bytes.first() {
                        Some(1) => {
                            let session =
                                u64::from_le_bytes(*bytes.get(1..9).and_then(|b| b.first_chunk()).ok_or(SHORT)?);
                            let nonce = *bytes.get(9..).and_then(|rest| rest.first_chunk()).ok_or(SHORT)?;
                            Ok(Hello { lane: 0, session, id: ID, nonce })
                        }
                        _ => Err(Error::Protocol("not a hello")),
                    }
                }

                fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
                    [&[2][..], nonce].concat()
                }

                fn parse_challenge(bytes: &[u8]) -> Result<(), Error> {
                    match bytes.first() {
                        Some(2) => Ok(()),
                        Some(0x80) => Err(Error::Refused(Denial::Busy)),
                        _ => Err(Error::Protocol("not a challenge")),
                    }
                }

                fn refusal(why: Refusal) -> Option<Vec<u8>> {
                    (why != Refusal::Malformed).then(|| vec![0x80])
                }

                fn welcome(grant: &u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
                    [&[3][..], &grant.to_le_bytes(), proof].concat()
                }

                fn denial(_: Denial) -> Vec<u8> {
                    vec![0x80]
                }

                fn parse_welcome(bytes: &[u8]) -> Result<(u64, [u8; PROOF_BYTES]), Error> {
                    match bytes.first() {
                        Some(3) => {
                            let grant =
                                u64::from_le_bytes(*bytes.get(1..9).and_then(|b| b.first_chunk()).ok_or(SHORT)?);
                            Ok((grant, *bytes.get(9..).and_then(|rest| rest.first_chunk()).ok_or(SHORT)?))
                        }
                        Some(0x80) => Err(Error::Refused(Denial::NotGranted)),
                        _ => Err(Error::Protocol("not a welcome")),
                    }
                }
            }
        };
    }

    plain!(Plain, b"plain reader", b"plain source");
    plain!(Relabelled, b"other reader", b"other source");

    /// A whole handshake: what the source says of the proof, and what the reader makes of the welcome.
    fn handshake<R: Format, S: Format<Grant = u64>>(
        readers: &Secret,
        sources: Option<&Secret>,
        change: impl Fn(&mut Vec<u8>, &mut Vec<u8>, &mut [u8; PROOF_BYTES]),
    ) -> Result<R::Grant, Error> {
        let (reader, mut hello) = Reader::<R>::hello(&HELLO);
        let (source, mut challenge) = Source::<S>::challenge(&hello, &NONCE).map_err(|rejected| rejected.error)?;
        let mut ignored = [0; PROOF_BYTES];
        change(&mut hello, &mut challenge, &mut ignored);
        let (reader, mut proof) = reader.prove(&challenge, readers)?;
        change(&mut hello, &mut challenge, &mut proof);
        let proved = source.examine(&proof, sources).map_err(Error::Refused)?;
        reader.finish(&proved.welcome(&77))
    }

    #[test]
    fn two_ends_that_share_the_secret_agree() {
        assert_eq!(handshake::<Plain, Plain>(&SECRET, Some(&SECRET), |_, _, _| ()).unwrap(), 77);
        let (_, hello) = Reader::<Plain>::hello(&HELLO);
        let (source, _) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        assert_eq!(*source.hello(), HELLO);
    }

    #[test]
    fn a_wrong_secret_and_an_unknown_session_are_denied_alike() {
        for sources in [Some(&[8; 32]), None] {
            let denied = handshake::<Plain, Plain>(&SECRET, sources, |_, _, _| ());
            assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
        }
        // Not even if the reader signs with the secret of no bytes.
        let denied = handshake::<Plain, Plain>(&[0; 32], None, |_, _, _| ());
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
    }

    #[test]
    fn proofs_under_another_label_are_refused_by_both_ends() {
        let denied = handshake::<Relabelled, Plain>(&SECRET, Some(&SECRET), |_, _, _| ());
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (_, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (reader, _) = reader.prove(&challenge, &SECRET).unwrap();
        let transcript = [hello, challenge].concat();
        let welcome = Plain::welcome(&77, &super::prove(&SECRET, b"other source", &transcript));
        assert!(matches!(reader.finish(&welcome), Err(Error::Impostor)));
    }

    #[test]
    fn a_source_without_the_secret_is_an_impostor() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (_, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (reader, _) = reader.prove(&challenge, &SECRET).unwrap();
        let transcript = [hello, challenge].concat();
        let welcome = Plain::welcome(&77, &super::prove(&[9; 32], Plain::SOURCE, &transcript));
        assert!(matches!(reader.finish(&welcome), Err(Error::Impostor)));
    }

    #[test]
    fn a_proof_that_is_reflected_proves_nothing() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (source, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (reader, proof) = reader.prove(&challenge, &SECRET).unwrap();
        // An impostor at the source's address returns the reader's own proof.
        assert!(matches!(reader.finish(&Plain::welcome(&77, &proof)), Err(Error::Impostor)));
        // A reader without the secret returns a proof that a source has made.
        let transcript = [hello, challenge].concat();
        let of_source = super::prove(&SECRET, Plain::SOURCE, &transcript);
        assert!(matches!(source.examine(&of_source, Some(&SECRET)), Err(Denial::NotGranted)));
    }

    #[test]
    fn a_proof_of_another_handshake_proves_nothing() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (_, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (_, recorded) = reader.prove(&challenge, &SECRET).unwrap();
        let (source, _) = Source::<Plain>::challenge(&hello, &[6; NONCE_BYTES]).unwrap();
        assert!(matches!(source.examine(&recorded, Some(&SECRET)), Err(Denial::NotGranted)));
    }

    #[test]
    fn a_message_changed_on_the_way_spoils_the_proof() {
        let denied = handshake::<Plain, Plain>(&SECRET, Some(&SECRET), |_, challenge, _| challenge[20] ^= 1);
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
        let denied = handshake::<Plain, Plain>(&SECRET, Some(&SECRET), |_, _, proof| proof[31] ^= 1);
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
    }

    #[test]
    fn truncated_messages_are_errors_at_every_length() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        for length in 0..hello.len() {
            let rejected = Source::<Plain>::challenge(&hello[..length], &NONCE).err().unwrap();
            assert!(matches!(rejected.error, Error::Protocol(_)), "{length}");
            assert_eq!(rejected.answer, None);
        }
        let (source, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        for length in 0..challenge.len() {
            let (reader, _) = Reader::<Plain>::hello(&HELLO);
            assert!(matches!(reader.prove(&challenge[..length], &SECRET), Err(Error::Protocol(_))), "{length}");
        }
        let (_, proof) = reader.prove(&challenge, &SECRET).unwrap();
        let welcome = source.examine(&proof, Some(&SECRET)).unwrap().welcome(&77);
        for length in 0..welcome.len() {
            let (reader, _) = Reader::<Plain>::hello(&HELLO).0.prove(&challenge, &SECRET).unwrap();
            assert!(matches!(reader.finish(&welcome[..length]), Err(Error::Protocol(_))), "{length}");
        }
    }

    #[test]
    fn what_a_transport_appends_to_a_message_is_not_signed() {
        let pad = |bytes: &mut Vec<u8>| bytes.resize(196, 0);
        let (reader, mut hello) = Reader::<Plain>::hello(&HELLO);
        pad(&mut hello);
        let (source, mut challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        pad(&mut challenge);
        let (reader, proof) = reader.prove(&challenge, &SECRET).unwrap();
        let welcome = source.examine(&proof, Some(&SECRET)).unwrap().welcome(&77);
        assert_eq!(reader.finish(&welcome).unwrap(), 77);
    }

    #[test]
    fn a_refusal_is_the_sources_reason_at_both_steps() {
        let (reader, _) = Reader::<Plain>::hello(&HELLO);
        let refusal = Plain::refusal(Refusal::Denied(Denial::Busy)).unwrap();
        assert!(matches!(reader.prove(&refusal, &SECRET), Err(Error::Refused(Denial::Busy))));
        let (reader, _) = Reader::<Plain>::hello(&HELLO).0.prove(&Plain::challenge(&NONCE), &SECRET).unwrap();
        let denial = Plain::denial(Denial::NotGranted);
        assert!(matches!(reader.finish(&denial), Err(Error::Refused(Denial::NotGranted))));
    }
}
