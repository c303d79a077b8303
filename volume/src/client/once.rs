//! Once: one question to servers, without opening the volume.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::{Address, Connection, Messenger};

use super::{ClientOptions, Error, Event, Volume, count, messenger};
use crate::link;
use crate::message::Standing;
use crate::shape::Shape;
use crate::wire::{Call, Mode, Reply};

impl Volume {
    /// Makes the copies of a new volume, one after the other. Its identity must be new: [`super::new_id`].
    ///
    /// # Errors
    /// [`Error::NotCreated`] for the first server that did not make its copy. Those before it have made theirs.
    pub fn create(shape: Shape, servers: &[Address], options: &ClientOptions) -> Result<(), Error> {
        count(shape, servers)?;
        let mut asker = Asker::new(options)?;
        for server in servers {
            let refused = |why: String| Error::NotCreated { server: server.to_string(), why };
            match asker.ask(std::slice::from_ref(server), &Call::Create { shape }).pop() {
                Some(Ok(Reply::Created)) => {}
                Some(Ok(other)) => return Err(refused(unexpected(&other))),
                Some(Err(why)) => return Err(refused(why)),
                None => return Err(refused("it was not asked".into())),
            }
        }
        Ok(())
    }

    /// How the copies of a volume stand, in the order of the servers, or why a server does not say. Disturbs no writer.
    ///
    /// # Errors
    /// The number of servers is not that of the copies, or the system provides no thread.
    pub fn standings(
        shape: Shape,
        servers: &[Address],
        options: &ClientOptions,
    ) -> Result<Vec<Result<Standing, String>>, Error> {
        count(shape, servers)?;
        // As a borrower, which has no room of its own and replaces no connection.
        let call = Call::Open { shape, mode: Mode::Borrow, writer: 0 };
        let answers = Asker::new(options)?.ask(servers, &call).into_iter();
        Ok(answers
            .map(|answer| match answer? {
                Reply::Standing { standing, .. } => Ok(standing),
                other => Err(unexpected(&other)),
            })
            .collect())
    }
}

/// What a reply says that does not answer the question.
fn unexpected(reply: &Reply) -> String {
    match reply {
        Reply::Refused { text, .. } => text.clone(),
        other => format!("an answer to another question: {other:?}"),
    }
}

/// A messenger for questions.
struct Asker {
    messenger: Messenger,
    events: Receiver<Event>,
    limit: Duration,
}

impl Asker {
    fn new(options: &ClientOptions) -> Result<Asker, Error> {
        let (post, events) = mpsc::channel();
        Ok(Asker { messenger: messenger(options, post)?, events, limit: options.copy_limit })
    }

    /// Asks all of them at once. Each has the same time to answer.
    fn ask(&mut self, servers: &[Address], call: &Call) -> Vec<Result<Reply, String>> {
        let until = Instant::now() + self.limit;
        let asked: Vec<_> = servers.iter().map(|server| self.send(server, call)).collect();
        let mut answers: Vec<Option<Result<Reply, String>>> =
            asked.iter().map(|asked| asked.as_ref().err().map(|why| Err(why.clone()))).collect();
        while answers.contains(&None) {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(event) = self.events.recv_timeout(left) else { break };
            let (connection, answer) = match event {
                Event::Answered(connection, delivery) => {
                    (connection, link::decode_reply(&delivery).map_err(|error| error.to_string()))
                }
                Event::Over(connection) => {
                    let why = connection.link_error().map(|error| error.to_string());
                    (connection, Err(why.unwrap_or_else(|| "the connection is over".into())))
                }
                _ => continue,
            };
            let of = asked.iter().position(|asked| asked.as_ref().is_ok_and(|asked| *asked == connection));
            if let Some(slot) = of.and_then(|at| answers.get_mut(at)) {
                slot.get_or_insert(answer);
            }
        }
        let late = || Err(format!("no answer within {:?}", self.limit));
        answers.into_iter().map(|answer| answer.unwrap_or_else(late)).collect()
    }

    fn send(&self, server: &Address, call: &Call) -> Result<Connection, String> {
        let message = link::call(call, Bytes::new()).map_err(|error| error.to_string())?;
        let connection = self.messenger.connect(server);
        connection.send(message).map_err(|error| error.to_string())?;
        Ok(connection)
    }
}
