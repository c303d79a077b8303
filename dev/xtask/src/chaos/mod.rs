//! The chaos: random load, and full copy after full copy while links are killed and agents stand still; after each,
//! every key is compared by its value.
//!
//! ```text
//!   writers ──▶ primary ◀── source ──▶ attend ──▶ A      copies again and again; links killed, agents stopped
//!                              │──▶ replicas that serve each other ──▶ B, C, D
//!                              │──▶ replica, late ──▶ E
//!                              └──▶ backup --journal ── restore --until a moment ──▶ F
//! ```
//!
//! What the soak does not look for: its data are large, its primaries save without a disk, and it compares digests.
//! Here half of the primaries save to disk, half of the data sets are so small that a snapshot and the first writes
//! arrive together, and what is compared are the values themselves (`remora_lab::contents`). A round is one draw of all
//! that:
//!
//! - [`plan`]: what is drawn. [`round`]: the servers, the agents, and what happens to them. [`load`]: the writers.

mod load;
mod plan;
mod round;

use std::time::{Duration, Instant};

use remora_bench::sync::Result;
use remora_lab::{Random, random, scratch};

use self::plan::Plan;
use self::round::Round;
use crate::demo::Which;
use crate::show::Screen;
use crate::stop;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// How many rounds to play.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,

    /// Begin no round after this many minutes.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,

    /// Seed of the first round; the next one has the next. Default: a random one, which is printed.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Which servers to use. Both: in turn.
    #[arg(long, value_name = "WHICH", default_value = "both")]
    server: Which,

    /// After a finding, go on with the next round.
    #[arg(long)]
    keep_going: bool,
}

/// What rounds have done.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Servers that were compared with their primary, or with what it held, key by key.
    compared: u64,
    /// Keys of these comparisons.
    keys: u64,
    /// Full copies that `attend` began from the source.
    served: u64,
    /// Commands that were written.
    commands: u64,
}

/// Plays the rounds.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err("namespaces, rules and users of servers need root".into());
    }
    let begun = Instant::now();
    let screen = Screen::new();
    let kinds = options.server.kinds();
    let program = screen.build_for(&kinds)?;
    let first = options.seed.unwrap_or_else(|| random::seed("chaos"));
    let (mut totals, mut findings, mut played) = (Totals::default(), Vec::new(), 0);
    for (number, kind) in (0..options.rounds).zip(kinds.iter().copied().cycle()) {
        if begun.elapsed() > Duration::from_secs(options.minutes * 60) {
            screen.say(&format!("{} minutes are over", options.minutes));
            break;
        }
        let seed = first.wrapping_add(number);
        let mut random = Random::new(seed);
        let plan = Plan::draw(kind, &mut random);
        screen.say(&format!("round {}: seed {seed}, {plan}", number + 1));
        let round_begun = Instant::now();
        let folder = scratch::folder("chaos")?;
        let outcome = Round::start(program.path(), folder.path(), &plan)
            .and_then(|round| round.play(&mut random, &screen, &mut totals));
        stop::check()?;
        played += 1;
        match outcome {
            Ok(said) => screen.say(&format!("  exact: {said}; {:.0} s", round_begun.elapsed().as_secs_f64())),
            Err(error) => {
                let kept = folder.keep();
                let finding = format!(
                    "FINDING in round {}, {plan}: {error}\n  again: make chaos ARGS=\"--rounds 1 --seed {seed} --server {}\"; folder {}",
                    number + 1,
                    plan.server(),
                    kept.display()
                );
                screen.say(&finding);
                findings.push(finding);
                if !options.keep_going {
                    break;
                }
            }
        }
    }
    println!(
        "{played} rounds from seed {first}: {} comparisons of {} keys, {} full copies begun from a source through attend, {} commands, {} \
         findings; {:.1} minutes",
        totals.compared,
        totals.keys,
        totals.served,
        totals.commands,
        findings.len(),
        begun.elapsed().as_secs_f64() / 60.0
    );
    match findings.len() {
        0 => Ok(()),
        count => Err(format!("{count} findings, described above").into()),
    }
}
