//! `remora plan`: what replicas of a primary need and cost, before an agent is started. It changes nothing, but some
//! keys count as used (LRU, LFU).
//!
//! - [`figures`]: from the primary's facts and the options to the figures, pure. [`sample`]: what some keys take.
//!   [`show`]: text and JSON.
//!
//! The figures are those of the agents: [`tables`](crate::source::tables) divides the source's memory, `Sinks` a
//! replica's, `estimate` has the times, and the primary's own facts say whether a hand-off can be pinned.

mod figures;
mod sample;
mod show;

use std::time::{Duration, Instant};

use self::figures::{Known, Plan, Writes};
use self::sample::Sample;
use crate::args::PlanArgs;
use crate::exit::Failure;
use crate::growth::Growth;
use crate::progress;
use crate::server::{Client, Facts, Task};

/// Asks the primary, and prints the plan on stdout.
///
/// # Errors
/// The primary does not answer, or the options leave no memory.
pub async fn run(args: PlanArgs) -> Result<(), Failure> {
    let server = args.server.open(Task::Plan)?;
    let mut client = server.connect().await?;
    let writes = match args.write_rate {
        Some(rate) => Writes { bytes_per_second: rate.get(), ..Writes::default() },
        None => measure(&mut client, args.measure).await?,
    };
    let info = client.info("").await?;
    let delay = match setting(&mut client, "repl-diskless-sync").await.as_deref() {
        Some("no") => None,
        _ => setting(&mut client, "repl-diskless-sync-delay").await.and_then(|text| text.parse().ok()),
    };
    let facts = Facts::from_info(&info);
    let sample = Sample::take(&mut client, &facts).await?;
    let known = Known {
        url: server.url().to_string(),
        facts,
        sample,
        host_memory: info.number("total_system_memory"),
        last_copied_on_write: info.number("rdb_last_cow_size").filter(|bytes| *bytes > 0),
        fork_delay: Duration::from_secs(delay.unwrap_or(0)),
        writes,
    };
    let plan = Plan::of(&args, &known)?;
    match args.json {
        true => progress::print_line(&show::as_json(&plan)),
        false => progress::print(&show::as_text(&plan)),
    }
}

async fn setting(client: &mut Client, name: &str) -> Option<String> {
    client.config_get(name).await.ok().flatten()
}

/// Looks at what clients write for this long. A server without a backlog does not count what it would send to replicas:
/// what it receives is then an upper bound.
async fn measure(client: &mut Client, time: Duration) -> Result<Writes, Failure> {
    let (mut stream, mut received, mut commands) = (Growth::default(), Growth::default(), Growth::default());
    let mut look = async |client: &mut Client| {
        let info = client.info("").await?;
        let (facts, now) = (Facts::from_info(&info), Instant::now());
        let number = |name: &str| info.number::<u64>(name).unwrap_or(0);
        let is_counted = facts.backlog.is_some_and(|backlog| backlog.active);
        let stream = stream.look(now, facts.offset.unwrap_or(0), Duration::ZERO);
        let received = received.look(now, number("total_net_input_bytes"), Duration::ZERO);
        let commands = commands.look(now, number("total_commands_processed"), Duration::ZERO);
        let (bytes, is_bound) = if is_counted { (stream, false) } else { (received, true) };
        let measured = bytes.zip(commands).map(|(bytes, commands)| Writes {
            bytes_per_second: bytes as u64,
            commands_per_second: Some(commands as u64),
            is_upper_bound: is_bound,
        });
        Ok::<_, Failure>(measured)
    };
    look(client).await?;
    tokio::time::sleep(time.max(LEAST_TIME)).await;
    Ok(look(client).await?.unwrap_or_default())
}

/// The shortest time that says anything about a rate.
const LEAST_TIME: Duration = Duration::from_millis(200);
