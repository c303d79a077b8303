//! Listening: a server that stays at the link is asked for its own word each second, so that a command that it could
//! not execute is told at once, and not only at the end of the stay.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::events;
use crate::server::own_changes::Counted;
use crate::server::{Client, Server, ServerError};
use crate::tasks::AbortOnDrop;

/// How often the server is asked.
const LISTEN_EVERY: Duration = Duration::from_secs(1);

/// Asks the server until the handle is dropped. It changes nothing.
pub(super) fn start(server: Server) -> AbortOnDrop {
    AbortOnDrop::new(&tokio::spawn(listen(server)))
}

async fn listen(server: Server) {
    let (mut client, mut before) = (None, None::<Counted>);
    let mut due = interval(LISTEN_EVERY);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        let now = match look(&server, &mut client).await {
            Ok(now) => now,
            Err(error) => {
                tracing::debug!("{error}; asked again");
                client = None;
                continue;
            }
        };
        let since = before.as_ref().map(|before| now.since(before)).unwrap_or_default();
        if let Some(count) = since.unexpected.filter(|count| *count > 0) {
            tracing::warn!(
                event = events::COMMANDS_FAILED,
                "the server {} could not execute {count} commands of its primary's stream, and is not an exact replica any more; \
                 its log names them, and the agent will end with code 6",
                server.url()
            );
        }
        if let Some(count) = since.evicted.filter(|count| *count > 0) {
            tracing::warn!("the server {} has removed {count} keys by itself, as its memory is full", server.url());
        }
        before = Some(now);
    }
}

async fn look(server: &Server, client: &mut Option<Client>) -> Result<Counted, ServerError> {
    let client = match client {
        Some(client) if client.is_usable() => client,
        other => other.insert(server.connect().await?),
    };
    Ok(Counted::of(&client.info("stats").await?))
}
