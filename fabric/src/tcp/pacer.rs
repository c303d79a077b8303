//! A rate limit for all lanes of an exporter together: it decides when the next bytes may be sent, in small pieces. A
//! rate slightly below that of the link keeps its queue short for all other traffic. Pure except [`LanePace`]: the time
//! is an argument.
//!
//! The rate is fixed, or that of a [`Background`] transfer, which the lanes keep informed.

use std::{
    fmt,
    net::TcpStream,
    num::NonZeroU64,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    UploadRate,
    background::{self, Background, LaneSample, Upload},
    socket,
};

/// Spaces pieces in time, so that their rate stays below a limit.
#[derive(Debug)]
pub(super) struct Pacer {
    state: Mutex<State>,
    /// How many bytes this end has received over the same link.
    received: Option<Received>,
    /// Set when the exporter ends: no lane waits after that.
    over: AtomicBool,
}

/// A count of bytes.
pub(super) struct Received(pub(super) Box<dyn Fn() -> u64 + Send + Sync>);

impl fmt::Debug for Received {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Received({})", self.0())
    }
}

#[derive(Debug)]
struct State {
    rate: Rate,
    /// When everything admitted so far has been sent at that rate; `None` if nothing was.
    free_at: Option<Instant>,
    told: Told,
}

#[derive(Debug)]
enum Rate {
    Fixed(NonZeroU64),
    Background(Box<Background>),
}

/// What the log was last told.
#[derive(Debug)]
struct Told {
    yields: bool,
    at: Option<Instant>,
}

/// A piece that may be sent after a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    bytes: usize,
    wait: Duration,
}

impl Pacer {
    /// A pacer for this rate; `None` if it is not limited. A background transfer sends at least as fast as `received`
    /// grows.
    pub(super) fn new(rate: UploadRate, now: Instant, received: Option<Received>) -> Option<Pacer> {
        let rate = match rate {
            UploadRate::Unlimited => return None,
            UploadRate::Fixed(rate) => Rate::Fixed(rate),
            UploadRate::Background => Rate::Background(Box::new(Background::new(now))),
        };
        let state = State { rate, free_at: None, told: Told { yields: false, at: None } };
        Some(Pacer { state: Mutex::new(state), received, over: AtomicBool::new(false) })
    }

    /// What a background transfer does at present; `None` for a fixed rate.
    pub(super) fn upload(&self) -> Option<Upload> {
        match &self.state().rate {
            Rate::Fixed(_) => None,
            Rate::Background(background) => Some(background.upload()),
        }
    }

    /// Ends all waits soon, and makes further ones return immediately.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Reserves the time to send a piece of at most `left` bytes. Reservations are served in order.
    fn reserve(&self, now: Instant, left: usize) -> Turn {
        let mut state = self.state();
        let (rate, piece) = match &state.rate {
            Rate::Fixed(rate) => (rate.get(), fixed_piece(*rate)),
            Rate::Background(background) => (background.rate(), background::piece(background.rate() as f64)),
        };
        let bytes = left.min(piece);
        if let Rate::Background(background) = &mut state.rate {
            background.admit(now, bytes);
        }
        let earliest = now.checked_sub(SAVED).unwrap_or(now);
        let begins = state.free_at.map_or(now, |free_at| free_at.max(earliest));
        state.free_at = Some(begins + Duration::from_secs_f64(bytes as f64 / rate as f64));
        Turn { bytes, wait: begins.saturating_duration_since(now) }
    }

    /// Takes what TCP says of a lane. Returns the present rate.
    fn sample(&self, now: Instant, sample: LaneSample) -> u64 {
        let received = self.received.as_ref().map(|received| received.0());
        let mut state = self.state();
        let Rate::Background(background) = &mut state.rate else { return u64::MAX };
        if let Some(received) = received {
            background.received(now, received);
        }
        background.sample(now, sample);
        let (rate, upload) = (background.rate(), background.upload());
        if state.told.is_news(now, upload) {
            drop(state);
            log(upload);
        }
        rate
    }

    fn leave(&self, lane: u64) {
        if let Rate::Background(background) = &mut self.state().rate {
            background.leave(lane);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The value is valid after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Told {
    /// Whether to log a change; notes it.
    fn is_news(&mut self, now: Instant, upload: Upload) -> bool {
        let is_late = self.at.is_none_or(|at| now.saturating_duration_since(at) >= LOG_TIME);
        let is_news = upload.yields != self.yields && is_late;
        if is_news {
            (self.yields, self.at) = (upload.yields, Some(now));
        }
        is_news
    }
}

fn log(upload: Upload) {
    let Upload { bytes_per_second, queueing, yields } = upload;
    let queueing_ms = queueing.as_secs_f64() * 1e3;
    match yields {
        true => tracing::info!(bytes_per_second, queueing_ms, "other traffic fills the network link: sending less"),
        false => tracing::info!(bytes_per_second, queueing_ms, "the network link has room again: sending more"),
    }
}

/// A lane at the pacer.
pub(super) struct LanePace<'a> {
    pacer: &'a Pacer,
    stream: &'a TcpStream,
    lane: u64,
    /// Whether TCP is asked how the lane is: not for a fixed rate.
    asks: bool,
    asked: Option<Instant>,
    /// The rate by which the system spaces the lane's packets.
    spaced: u64,
}

impl<'a> LanePace<'a> {
    /// `None` if nothing limits this lane: there is no pacer, or both of its ends are on this host, so that it takes no
    /// network from others.
    pub(super) fn new(pacer: Option<&'a Pacer>, stream: &'a TcpStream, lane: u64) -> Option<LanePace<'a>> {
        let pacer = pacer?;
        let asks = pacer.upload().is_some();
        if asks && socket::is_within_host(stream) {
            return None;
        }
        Some(LanePace { pacer, stream, lane, asks, asked: None, spaced: 0 })
    }

    /// Waits until the next piece of at most `left` bytes may be sent, or `cancelled` returns true. Returns the size of
    /// the piece.
    pub(super) fn wait(&mut self, left: usize, cancelled: impl Fn() -> bool) -> usize {
        let now = Instant::now();
        if self.asks {
            self.ask(now);
        }
        let Turn { bytes, wait } = self.pacer.reserve(now, left);
        let until = now + wait;
        loop {
            if cancelled() || self.pacer.over.load(Ordering::Relaxed) {
                return bytes;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return bytes;
            }
            std::thread::sleep(left.min(LOOK_TIME));
        }
    }

    /// Asks TCP how the lane is, if that was a while ago.
    fn ask(&mut self, now: Instant) {
        if self.asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_TIME) {
            return;
        }
        self.asked = Some(now);
        let told = match socket::told(self.stream) {
            Ok(told) => told,
            Err(error) => {
                // The lane keeps the rate that it has; sending finds a connection that has failed.
                tracing::debug!(lane = self.lane, %error, "cannot read TCP_INFO of a lane");
                return;
            }
        };
        let socket::Told { least, present, acknowledged, sent_again } = told;
        let rate = self.pacer.sample(now, LaneSample { lane: self.lane, least, present, acknowledged, sent_again });
        self.space(rate);
    }

    /// Makes the system space the lane's packets, so that bytes which the reader has delayed do not leave in a burst.
    fn space(&mut self, rate: u64) {
        let spaced = rate.saturating_add(rate / SPACING_ABOVE);
        if spaced.abs_diff(self.spaced) <= self.spaced / SPACING_ABOVE / 2 {
            return;
        }
        self.spaced = spaced;
        if let Some(spaced) = NonZeroU64::new(spaced)
            && let Err(error) = socket::smooth(self.stream, spaced)
        {
            // The rate is still kept, but with bursts.
            tracing::debug!(lane = self.lane, %error, "cannot set SO_MAX_PACING_RATE on a lane");
        }
    }
}

impl Drop for LanePace<'_> {
    fn drop(&mut self) {
        self.pacer.leave(self.lane);
    }
}

/// Bytes per piece at a fixed rate.
fn fixed_piece(rate: NonZeroU64) -> usize {
    let bytes = u128::from(rate.get()) * PIECE_TIME.as_micros() / 1_000_000;
    (bytes as usize).clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
}

/// Time that one piece takes at a fixed rate: no other sender waits longer behind it.
const PIECE_TIME: Duration = Duration::from_micros(500);

/// Minimum size of a piece: two packets, which network cards send more efficiently together.
const LEAST_PIECE_BYTES: usize = 4 << 10;

/// Maximum size of a piece: that of an answer, after which a revoked region is noticed.
const MOST_PIECE_BYTES: usize = 1 << 20;

/// Time that may be caught up on, because threads wake slightly late. More would be a burst.
const SAVED: Duration = Duration::from_millis(1);

/// Interval at which a waiting lane checks whether to give up.
const LOOK_TIME: Duration = Duration::from_millis(50);

/// Interval at which a lane asks TCP: a few times within the delays that count together. It takes about a microsecond.
const ASK_TIME: Duration = Duration::from_millis(1);

/// The system spaces packets by a rate that is above the pacer's by one part in this many: it counts headers too, and
/// must not be what limits the lane.
const SPACING_ABOVE: u64 = 4;

/// The log is told of no more than one change in this time.
const LOG_TIME: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;

    fn pacer(rate: u64) -> Pacer {
        Pacer::new(UploadRate::Fixed(NonZeroU64::new(rate).unwrap()), Instant::now(), None).unwrap()
    }

    proptest! {
        /// However late a sender wakes: in no stretch of time is more sent than the rate, one piece and the saved time
        /// allow.
        #[test]
        fn no_more_leaves_than_the_rate(
            rate in 100_000u64..1_000_000_000,
            late in proptest::collection::vec(0u64..5_000, 2..200),
        ) {
            let pacer = pacer(rate);
            let mut now = Instant::now();
            let (mut left, mut piece) = (Vec::new(), 0);
            for late in late {
                let turn = pacer.reserve(now, usize::MAX);
                now += turn.wait + Duration::from_micros(late);
                piece = turn.bytes;
                left.push(now);
            }
            for first in 0..left.len() {
                for last in first..left.len() {
                    let bytes = (last - first) * piece;
                    let time = left[last] - left[first] + SAVED + Duration::from_millis(5);
                    prop_assert!(bytes as f64 <= rate as f64 * time.as_secs_f64() + 1.0);
                }
            }
        }
    }

    #[test]
    fn a_sender_that_is_always_slightly_late_still_gets_the_rate() {
        let pacer = pacer(100_000_000);
        let (start, mut sent) = (Instant::now(), 0);
        let mut now = start;
        for _ in 0..1000 {
            let Turn { bytes, wait } = pacer.reserve(now, usize::MAX);
            now += if wait.is_zero() { Duration::ZERO } else { wait + Duration::from_micros(80) };
            sent += bytes;
        }
        let rate = sent as f64 / (now - start).as_secs_f64();
        assert!((0.99e8..1.01e8).contains(&rate), "{rate}");
    }

    #[test]
    fn pieces_are_short_in_time() {
        let piece = |rate| pacer(rate).reserve(Instant::now(), usize::MAX).bytes;
        assert_eq!(piece(64 << 10), LEAST_PIECE_BYTES);
        assert_eq!(piece(100_000_000), 50_000);
        assert_eq!(piece(u64::MAX), MOST_PIECE_BYTES);
        assert_eq!(pacer(u64::MAX).reserve(Instant::now(), 77).bytes, 77, "no more than is left");
    }

    #[test]
    fn a_cancelled_wait_returns_immediately() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let pacer = pacer(1);
        let mut lane = LanePace::new(Some(&pacer), &stream, 0).unwrap();
        let began = Instant::now();
        lane.wait(1 << 20, || false); // the first may go at once
        lane.wait(1, || true);
        pacer.end();
        lane.wait(1, || false);
        assert!(began.elapsed() < Duration::from_secs(60), "4096 s were reserved");
    }

    #[test]
    fn lanes_within_this_host_are_not_limited_in_the_background() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let pacer = Pacer::new(UploadRate::Background, Instant::now(), None).unwrap();
        assert!(LanePace::new(Some(&pacer), &stream, 0).is_none());
        assert!(Pacer::new(UploadRate::Unlimited, Instant::now(), None).is_none());
    }

    #[test]
    fn the_log_is_not_told_of_every_change() {
        let (mut told, start) = (Told { yields: false, at: None }, Instant::now());
        let upload = |yields| Upload { bytes_per_second: 1, queueing: Duration::ZERO, yields };
        assert!(!told.is_news(start, upload(false)));
        assert!(told.is_news(start, upload(true)));
        assert!(!told.is_news(start + LOG_TIME / 2, upload(false)));
        assert!(told.is_news(start + LOG_TIME, upload(false)));
    }
}
