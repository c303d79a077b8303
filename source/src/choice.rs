//! Choice: what the loop knows of the bases, for a dry run and the status. The captures choose for themselves, by the
//! same order ([`bases`]), when they begin.

use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_protocol::{Base, BaseKind};
use tokio::sync::mpsc::Sender;

use super::bases::{self, Candidate, Data, Known, World};
use super::capture::{Tried, candidate, of_the_server};
use super::machine::Format;
use super::{Incoming, Source};
use remora_process::rdb_file::{Found, Stored};
use remora_process::{AbortOnDrop, blocking};

/// What the loop knows.
#[derive(Default)]
pub(super) struct Choice {
    found: Vec<Found>,
    /// Which ones were tried lately.
    pub(super) tried: Tried,
    /// What the present snapshot was made of, if it was stored.
    from: Option<From>,
    _looking: Option<AbortOnDrop>,
}

/// A snapshot was made of what was stored.
struct From {
    generation: u64,
    place: String,
    /// How old the data were when it began.
    age: Duration,
}

impl Choice {
    /// Begins to look at what is stored, if anything is named.
    pub(super) fn begin(stored: Option<&Arc<dyn Stored>>, tell: Sender<Incoming>) -> Choice {
        let looking = stored.map(|stored| AbortOnDrop::new(&tokio::spawn(look(stored.clone(), tell))));
        Choice { _looking: looking, ..Choice::default() }
    }

    /// A look has ended.
    pub(super) fn found(&mut self, found: Vec<Found>) {
        self.found = found;
    }

    /// A snapshot begins that is made of what is stored.
    pub(super) fn begins(&mut self, generation: u64, place: &str, age: Duration) {
        let place = place.to_owned();
        self.from = Some(From { generation, place, age });
    }
}

async fn look(stored: Arc<dyn Stored>, tell: Sender<Incoming>) {
    loop {
        let asked = stored.clone();
        let Ok(found) = blocking(move || Ok(asked.look())).await else { return };
        if tell.send(Incoming::Stored(found)).await.is_err() {
            return;
        }
        tokio::time::sleep(stored.holds()).await;
    }
}

/// From what a replica is made that joins now.
pub(super) fn base(source: &Source) -> Base {
    let candidates = candidates(source);
    let stream = source.machine.status().stream;
    let journal = stream.map(|stream| {
        let (first, end) = source.gauge.journal();
        (stream.history, first, end)
    });
    let world = World {
        facts: &source.facts,
        journal,
        journal_bytes: source.tables.journal_ring(),
        max_age: source.options.max_age,
        no_fork: source.options.no_fork,
    };
    let told = bases::order(&candidates, &world).told(&candidates);
    match made_of(source).filter(|_| told.kind == BaseKind::Snapshot) {
        None => told,
        // It serves by its age here. Its data are older.
        Some(from) => Base { age_seconds: told.age_seconds.saturating_add(from.age.as_secs()), ..told },
    }
}

/// What there is.
fn candidates(source: &Source) -> Vec<Candidate> {
    let (options, methods, now) = (&source.options, &source.methods, Instant::now());
    let mut all: Vec<Candidate> = held(source, now).into_iter().collect();
    if options.first.is_some() {
        all.push(Candidate::new(BaseKind::Copy));
    }
    if let Some(file) = methods.file() {
        all.push(file);
        return all;
    }
    let is_shared = source.machine.status().snapshot.is_some_and(|snapshot| snapshot.format == Format::Shared);
    all.extend(source.choice.found.iter().map(|found| candidate(found, is_shared, &source.choice.tried)));
    all.extend(of_the_server(options.module.capture, options.no_fork, methods.sweep_failed_lately(now)));
    all
}

/// What the present snapshot was made of, if it was stored.
fn made_of(source: &Source) -> Option<&From> {
    let generation = source.machine.status().snapshot?.generation;
    source.choice.from.as_ref().filter(|from| from.generation == generation)
}

/// The snapshot that is here, or is being taken.
fn held(source: &Source, now: Instant) -> Option<Candidate> {
    let snapshot = source.machine.status().snapshot?;
    let place =
        made_of(source).map_or(String::new(), |from| format!("{}, from {}", BaseKind::Snapshot.words(), from.place));
    let known = match snapshot.origin() {
        _ if source.tables.is_windowed_for(&source.facts) => Known::Unusable("its slots are reused".to_owned()),
        None => Known::New,
        Some(_) if let Some(why) = source.machine.why_late(now) => Known::Unusable(why.to_owned()),
        Some(origin) => {
            let age = now.saturating_duration_since(snapshot.taken());
            Known::There(Data { history: origin.history, offset: origin.offset, reaches: origin.offset, age })
        }
    };
    Some(Candidate { kind: BaseKind::Snapshot, place, known })
}
