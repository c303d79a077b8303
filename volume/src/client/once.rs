//! Questions to servers that need no open volume, and a look at what a volume holds before its writer is replaced.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::{Address, Connection, Messenger};

use super::{AT_WORK, ClientOptions, Error, Event, Post, Volume, count, messenger, why_over};
use crate::link::{self, Caller};
use crate::rules::{Holder, Standing, State, Version};
use crate::shape::{BLOCK_BYTES, Shape};
use crate::wire::{Call, Findings, Mode, Reply, Run, Status};

// One question to servers, without opening the volume.

impl Volume {
    /// Makes the copies of a new volume, one after the other. Its identity must be new: [`super::new_id`].
    ///
    /// # Errors
    /// [`Error::NotCreated`] for the first server that did not make its copy. Those before it have removed theirs, as
    /// far as they answer.
    pub fn create(shape: Shape, servers: &[Address], options: &ClientOptions) -> Result<(), Error> {
        count(shape, servers)?;
        let mut asker = Asker::new(options)?;
        for (number, server) in servers.iter().enumerate() {
            let why = match asker.ask(std::slice::from_ref(server), &Call::Create { shape }).pop() {
                Some(Ok(Reply::Created)) => continue,
                Some(Ok(other)) => unexpected(&other),
                Some(Err(why)) => why,
                None => "it was not asked".into(),
            };
            let made = &servers[..number];
            let removed = asker.ask(made, &Call::Remove { shape, takes_over: false });
            let left = made.iter().zip(removed).filter(|(_, removed)| !matches!(removed, Ok(Reply::Removed { .. })));
            let left = left.map(|(server, _)| server.to_string()).collect();
            return Err(Error::NotCreated { server: server.to_string(), why, left: Left(left) });
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
        let statuses = Volume::statuses(shape, servers, options)?;
        Ok(statuses.into_iter().map(|status| status.map(|status| status.standing)).collect())
    }

    /// As [`Volume::standings`], with what is under way and what is used of each server.
    ///
    /// # Errors
    /// As for [`Volume::standings`].
    pub fn statuses(
        shape: Shape,
        servers: &[Address],
        options: &ClientOptions,
    ) -> Result<Vec<Result<Status, String>>, Error> {
        count(shape, servers)?;
        let answers = Asker::new(options)?.ask(servers, &Call::Status { shape }).into_iter();
        Ok(answers
            .map(|answer| match answer? {
                Reply::Status(status) => Ok(*status),
                other => Err(unexpected(&other)),
            })
            .collect())
    }

    /// Has every block of each copy read and checked, at all servers at once, beside the writer's work. `progress` is
    /// called with the number of a server and what it has found so far. Returns what each has found, or why it does not
    /// say.
    ///
    /// # Errors
    /// As for [`Volume::standings`].
    pub fn scrub(
        shape: Shape,
        servers: &[Address],
        options: &ClientOptions,
        mut progress: impl FnMut(usize, Findings),
    ) -> Result<Vec<Result<Findings, String>>, Error> {
        count(shape, servers)?;
        let mut asker = Asker::new(options)?;
        asker.limit = SCRUB_LIMIT;
        let answers = asker.ask_until(servers, &Call::Scrub { shape }, |server, reply| match reply {
            Reply::Scrubbing(findings) => {
                progress(server, *findings);
                findings.is_complete
            }
            _ => true,
        });
        Ok(answers
            .into_iter()
            .map(|answer| match answer? {
                Reply::Scrubbing(findings) => Ok(findings),
                other => Err(unexpected(&other)),
            })
            .collect())
    }

    /// Removes the copies of a volume, with their stores. A writer that is at work is ended first, if that is wanted.
    /// Says of each server whether it had one, or why it may still have it.
    ///
    /// # Errors
    /// [`Error::InUse`] if a writer is at work, unless [`ClientOptions::take_over`]: then nothing was removed.
    /// Otherwise as for [`Volume::standings`].
    pub fn remove(
        shape: Shape,
        servers: &[Address],
        options: &ClientOptions,
    ) -> Result<Vec<Result<bool, String>>, Error> {
        let takes_over = options.take_over;
        end_writer(shape, servers, options)?;
        let answers = Asker::new(options)?.ask(servers, &Call::Remove { shape, takes_over }).into_iter();
        Ok(answers
            .map(|answer| match answer? {
                Reply::Removed { was_there } => Ok(was_there),
                other => Err(unexpected(&other)),
            })
            .collect())
    }

    /// Looks at the copy that is furthest. `None`: no writer has opened the volume, or no copy can be read, so that
    /// there is nothing to look at.
    ///
    /// # Errors
    /// As for [`Volume::standings`].
    pub fn peek(shape: Shape, servers: &[Address], options: &ClientOptions) -> Result<Option<Peek>, Error> {
        count(shape, servers)?;
        let mut asker = Asker::new(options)?;
        asker.limit = LIMIT;
        // As many as one of has every acknowledged write. Others may be on the host that has died.
        let answers = asker.ask_for(servers, &Call::Status { shape }, shape.copies().promises(), |_, _| true);
        let mut found: Vec<_> = servers
            .iter()
            .zip(answers)
            .filter_map(|(server, answer)| match answer {
                Ok(Reply::Status(status)) if status.standing.state == State::Whole => Some((server, status.standing)),
                _ => None,
            })
            .filter_map(|(server, standing)| Some((standing.applied, standing.promised?, server)))
            .collect();
        found.sort_by_key(|(applied, ..)| std::cmp::Reverse(*applied));
        let open = |(_, holder, server): (Version, Holder, &Address)| {
            let caller = Caller::connect(server, &options.security).ok()?;
            let peek = Peek { caller, holder, blocks: shape.blocks() };
            // As a borrower: the writer's own connection stays.
            let open = Call::Open { shape, mode: Mode::Borrow, writer: holder.writer };
            matches!(peek.ask(&open), Ok((Reply::Standing { .. }, _))).then_some(peek)
        };
        Ok(found.into_iter().find_map(open))
    }
}

impl Volume {
    /// Makes a volume larger: its copies become those of a volume of `blocks` blocks. What it holds stays, and zeros
    /// follow. All servers are asked first, and if one refuses, nothing changes. Then a writer that is at work is
    /// ended, if that is wanted. `progress` is called with the number of a server and how many blocks it has copied.
    /// Says of each server whether it has a copy, or why it has not grown: it did not answer. So many copies have grown
    /// that the volume can be opened with the new size; otherwise those that had have gone back.
    ///
    /// The size is agreed when it is in the volume's file. [`Volume::agree`] tells the servers, and so does the first
    /// writer. Until then a writer of the former size can open the volume, and the copies go back.
    ///
    /// It can be called again, with the shape of before or with that of after: servers that have grown say so. With
    /// that of after twice, a writer of the new size goes on meanwhile. With that of before twice, copies whose size
    /// was not agreed go back to it.
    ///
    /// A writer of the former size and one of the new size cannot both acknowledge writes: each needs promises of
    /// servers whose copies have its size, and these keep what they have promised as they grow.
    ///
    /// # Errors
    /// [`Error::InUse`] if a writer is at work, unless [`ClientOptions::take_over`]; [`Error::NotGrown`] if a server
    /// refuses: then no copy has grown, or those that had are as before, as far as they answer. Otherwise as for
    /// [`Volume::standings`].
    pub fn grow(
        (shape, larger): (Shape, Shape),
        servers: &[Address],
        options: &ClientOptions,
        mut progress: impl FnMut(usize, u64),
    ) -> Result<Vec<Result<bool, String>>, Error> {
        count(larger, servers)?;
        let (is_other, takes_over) = (shape != larger, options.take_over);
        let mut asker = Asker::new(options)?;
        if is_other {
            let is_at_work = has_writer(shape, servers, options)?;
            let may = asker.ask(servers, &Call::MayGrow { shape: larger, takes_over });
            if let Some(why) = refusals(servers, &may) {
                return Err(Error::NotGrown { why, left: Left::default() });
            }
            if is_at_work {
                replace_writer(shape, servers, options);
            }
        }
        asker.limit = GROW_LIMIT;
        let mut ask = |call: &Call, places: &[usize]| {
            let servers: Vec<_> = places.iter().map(|place| servers[*place].clone()).collect();
            asker.ask_until(&servers, call, |server, reply| match reply {
                Reply::Progress { compared } => {
                    progress(places[server], *compared);
                    false
                }
                _ => true,
            })
        };
        let all: Vec<_> = (0..servers.len()).collect();
        let answers = ask(&Call::Grow { shape: larger, takes_over }, &all);
        let copies = answers.iter().filter(|answer| matches!(answer, Ok(Reply::Grown { is_there: true }))).count();
        let too_few = (copies < larger.copies().promises()).then(|| too_few(servers, &answers));
        if let Some(why) = refusals(servers, &answers).or(too_few).filter(|_| is_other) {
            // Something has changed since they were asked, or servers have vanished. Those that have grown go back.
            let has_grown = |place: &usize| matches!(answers[*place], Ok(Reply::Grown { .. }));
            let grown: Vec<_> = all.iter().copied().filter(has_grown).collect();
            let gone = grown.iter().zip(ask(&Call::Grow { shape, takes_over }, &grown));
            let left = gone.filter(|(_, gone)| !matches!(gone, Ok(Reply::Grown { .. })));
            let left = Left(left.map(|(place, _)| servers[*place].to_string()).collect());
            return Err(Error::NotGrown { why, left });
        }
        Ok(answers.into_iter().map(grown).collect())
    }

    /// Tells the servers that the size of this volume is agreed. Says of each whether it has a copy, or why its copy
    /// can have another size: then the next writer puts that right.
    ///
    /// # Errors
    /// As for [`Volume::standings`].
    pub fn agree(
        shape: Shape,
        servers: &[Address],
        options: &ClientOptions,
    ) -> Result<Vec<Result<bool, String>>, Error> {
        count(shape, servers)?;
        let answers = Asker::new(options)?.ask(servers, &Call::Agree { shape });
        Ok(answers.into_iter().map(grown).collect())
    }
}

/// Whether a server has a copy of the size that it was asked for.
fn grown(answer: Result<Reply, String>) -> Result<bool, String> {
    match answer? {
        Reply::Grown { is_there } => Ok(is_there),
        other => Err(unexpected(&other)),
    }
}

/// Why a volume cannot be opened with a size.
fn too_few(servers: &[Address], answers: &[Result<Reply, String>]) -> String {
    let missing = servers.iter().zip(answers).filter_map(|(server, answer)| match answer {
        Ok(Reply::Grown { is_there: true }) => None,
        Ok(_) => Some(format!("{server} has no copy")),
        Err(why) => Some(format!("{server}: {why}")),
    });
    format!("too few servers have a copy of the new size: {}", missing.collect::<Vec<_>>().join("; "))
}

/// What a reply says that does not answer the question.
fn unexpected(reply: &Reply) -> String {
    match reply {
        Reply::Refused { text, .. } => text.clone(),
        other => format!("an answer to another question: {other:?}"),
    }
}

/// A messenger for questions.
pub(super) struct Asker {
    messenger: Messenger,
    events: Receiver<Event>,
    pub(super) limit: Duration,
}

impl Asker {
    pub(super) fn new(options: &ClientOptions) -> Result<Asker, Error> {
        let (post, events) = mpsc::channel();
        let dispatcher = Post(move |event| _ = post.send(event)); // the question may be over
        Ok(Asker { messenger: messenger(options, dispatcher)?, events, limit: options.copy_limit })
    }

    /// Asks all of them at once. Each has the same time to answer.
    fn ask(&mut self, servers: &[Address], call: &Call) -> Vec<Result<Reply, String>> {
        self.ask_until(servers, call, |_, _| true)
    }

    /// As [`Asker::ask`], of a question that has several answers: `is_last` says which is the last one of a server.
    /// Each has its time anew after each answer.
    fn ask_until(
        &mut self,
        servers: &[Address],
        call: &Call,
        is_last: impl FnMut(usize, &Reply) -> bool,
    ) -> Vec<Result<Reply, String>> {
        self.ask_for(servers, call, usize::MAX, is_last)
    }

    /// As [`Asker::ask_until`], but not longer than until this number of last answers has come.
    pub(super) fn ask_for(
        &mut self,
        servers: &[Address],
        call: &Call,
        enough: usize,
        mut is_last: impl FnMut(usize, &Reply) -> bool,
    ) -> Vec<Result<Reply, String>> {
        let mut asked: Vec<Asked> = servers.iter().map(|server| self.send(server, call)).collect();
        let late = format!("no answer within {:?}", self.limit);
        loop {
            let now = Instant::now();
            for one in asked.iter_mut().filter(|one| one.until <= now) {
                one.answer.get_or_insert_with(|| Err(late.clone()));
            }
            if asked.iter().filter(|one| matches!(one.answer, Some(Ok(_)))).count() >= enough {
                break;
            }
            let Some(until) = asked.iter().filter(|one| one.answer.is_none()).map(|one| one.until).min() else { break };
            let (connection, answer) = match self.events.recv_timeout(until.saturating_duration_since(now)) {
                Ok(Event::Answered(connection, delivery)) => {
                    (connection, link::decode_reply(&delivery).map_err(|error| error.to_string()))
                }
                Ok(Event::Over(connection)) => {
                    let why = why_over(&connection);
                    (connection, Err(why))
                }
                Ok(Event::Refused(connection, why)) => (connection, Err(why.to_string())),
                _ => continue,
            };
            let of = asked.iter_mut().enumerate().find(|(_, one)| one.connection.as_ref() == Some(&connection));
            let Some((number, one)) = of.filter(|(_, one)| one.answer.is_none()) else { continue };
            one.until = Instant::now() + self.limit;
            if answer.as_ref().map_or(true, |reply| is_last(number, reply)) {
                one.answer = Some(answer);
            }
        }
        for connection in asked.iter().filter_map(|one| one.connection.as_ref()) {
            connection.abort();
        }
        asked.into_iter().map(|one| one.answer.unwrap_or(Err(late.clone()))).collect()
    }

    fn send(&self, server: &Address, call: &Call) -> Asked {
        let until = Instant::now() + self.limit;
        let sent = link::call(call, Bytes::new()).map_err(|error| error.to_string()).and_then(|message| {
            let connection = self.messenger.connect(server);
            connection.send(message).map_err(|error| error.to_string())?;
            Ok(connection)
        });
        match sent {
            Ok(connection) => Asked { connection: Some(connection), until, answer: None },
            Err(why) => Asked { connection: None, until, answer: Some(Err(why)) },
        }
    }
}

/// A question to one server.
struct Asked {
    connection: Option<Connection>,
    until: Instant,
    /// The last answer, or why none has arrived.
    answer: Option<Result<Reply, String>>,
}

/// What servers have refused, if any has. One that does not answer refuses nothing.
fn refusals(servers: &[Address], answers: &[Result<Reply, String>]) -> Option<String> {
    let refused = servers.iter().zip(answers).filter_map(|(server, answer)| match answer {
        Ok(Reply::Grown { .. }) | Err(_) => None,
        Ok(other) => Some(format!("{server}: {}", unexpected(other))),
    });
    Some(refused.collect::<Vec<_>>().join("; ")).filter(|why| !why.is_empty())
}

/// Ends the writer that is at work, if one is and that is wanted.
fn end_writer(shape: Shape, servers: &[Address], options: &ClientOptions) -> Result<(), Error> {
    if has_writer(shape, servers, options)? {
        replace_writer(shape, servers, options);
    }
    Ok(())
}

/// Whether a writer has the volume open.
///
/// # Errors
/// [`Error::InUse`]: it is at work, and is not to be replaced.
fn has_writer(shape: Shape, servers: &[Address], options: &ClientOptions) -> Result<bool, Error> {
    let statuses = Volume::statuses(shape, servers, options)?;
    for (server, status) in servers.iter().zip(&statuses) {
        let silent = status.as_ref().ok().and_then(|status| status.writer_silent);
        let silent = silent.map(|silent| Duration::from_millis(silent.into()));
        if let Some(silent) = silent.filter(|silent| !options.take_over && *silent < AT_WORK) {
            return Err(Error::InUse { server: server.to_string(), silent });
        }
    }
    Ok(statuses.iter().flatten().any(|status| status.writer_silent.is_some()))
}

/// Replaces a writer that is at work, so that it learns why it ends, and takes no copy back that is removed.
fn replace_writer(shape: Shape, servers: &[Address], options: &ClientOptions) {
    match Volume::open(shape, servers, options) {
        Ok(volume) => {
            std::thread::sleep(TOLD_WITHIN);
            drop(volume);
        }
        Err(error) => {
            tracing::warn!(volume = %shape.volume(), %error, "the writer at work could not be replaced");
        }
    }
}

/// A writer that has nothing to do asks each second, and so learns that it was replaced.
const TOLD_WITHIN: Duration = Duration::from_secs(2);

/// Servers whose copies are not as they should be after something was given up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left(pub Vec<String>);

impl Left {
    /// What to do about them.
    fn text(&self, cure: &str) -> String {
        if self.0.is_empty() { String::new() } else { format!("; {} {cure}", self.0.join(" and ")) }
    }

    /// After a volume was not made.
    pub(super) fn made(&self) -> String {
        self.text(
            "may keep a copy that no client will use: restart the server there, and with --store first delete the \
             volume's folder in the store",
        )
    }

    /// After a volume has not grown.
    pub(super) fn grown(&self) -> String {
        self.text("may have a copy of the new size: the next writer has it go back when the server there answers")
    }
}

/// A server that copies says how far it is several times a second. To make the files of a large copy, it may need a
/// while.
const GROW_LIMIT: Duration = Duration::from_secs(60);

/// A server that scrubs says how far it is several times a second. During a checkpoint it does not.
const SCRUB_LIMIT: Duration = Duration::from_secs(60);

// What a volume holds, looked at before its writer is replaced. It changes nothing, and that writer goes on.
//
// A server lends blocks to who names the writer that it obeys. So the copy is as that writer has it, and no promise is
// asked for.

/// A copy that can be read, of a volume that another writer may have open.
pub struct Peek {
    caller: Caller,
    holder: Holder,
    blocks: u64,
}

impl Peek {
    /// Blocks of the volume.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Reads blocks. What the writer changes meanwhile may be of before or of after.
    ///
    /// # Errors
    /// The server does not answer, or another writer has opened the volume.
    pub fn read(&self, run: Run) -> Result<Bytes, String> {
        let lend = Call::Lend { holder: self.holder, since: Version::NONE, run, with_blocks: true };
        match self.ask(&lend)? {
            (Reply::Lent { .. }, data) if data.len() == run.count as usize * BLOCK_BYTES => Ok(data),
            (Reply::Refused { text, .. }, _) => Err(text),
            (other, _) => Err(format!("an answer to another question: {other:?}")),
        }
    }

    fn ask(&self, call: &Call) -> Result<(Reply, Bytes), String> {
        let (reply, data) = self.caller.ask(call, LIMIT, || Ok::<_, String>(()))?;
        Ok((reply, Bytes::copy_from_slice(&data)))
    }
}

/// How long a server may take for an answer: a look must not delay a take-over for longer.
const LIMIT: Duration = Duration::from_secs(1);
