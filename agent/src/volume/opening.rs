//! Opening: a volume is opened for writing, as `nbd`, `mount` and `format` do, or for reading alone.

use remora_files::{FilesError, Purpose};
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Reads, Volume};
use remora_volume::read_only::{ReadOnly, ReadOnlyOptions};
use remora_volume::rules::ServerId;
use remora_volume::shape::Shape;
use remora_volume::writer::End;

use super::file::VolumeFile;
use super::servers::{Protection, Shown};
use crate::args::{WaysArgs, WriterArgs};
use crate::exit::{Code, Failure};
use crate::signals::Signals;
use crate::tasks::{AbortOnDrop, blocking};

/// A volume that is about to be opened.
pub(super) struct Opening {
    name: String,
    file: VolumeFile,
    protection: Protection,
    options: ClientOptions,
    rereading: AbortOnDrop,
}

impl Opening {
    /// Reads the files that the options name.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(super) fn read(args: &WriterArgs) -> Result<Opening, Failure> {
        let protection = Protection::read(&args.protection)?;
        let rereading = protection.tokens.read_again_on_hangup()?;
        let file = VolumeFile::read(&args.file)?;
        let WaysArgs { window, reads, writes } = args.ways;
        let options = ClientOptions {
            security: protection.of_connections()?,
            copy_limit: args.copy_timeout,
            take_over: args.take_over,
            window,
            reads,
            writes,
            rdma: protection.rdma(&args.rdma)?,
        };
        Ok(Opening { name: args.file.display().to_string(), file, protection, options, rereading })
    }

    /// The volume's name, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// What those who watch are shown of it.
    pub(super) fn shown(&self) -> Shown {
        let servers = self.file.servers.iter().map(ToString::to_string).collect();
        Shown { file: self.name.clone(), shape: self.file.shape, servers }
    }

    /// Opens the volume for this purpose, and has `use_it` done with it by a thread that may wait. What is returned
    /// beside its result keeps the files of tokens and certificates up to date.
    ///
    /// If another writer may be replaced for it, what the volume holds is looked at before: that writer goes on if it
    /// is not what is wanted. Whatever of this host can keep `use_it` from succeeding is to be tried before this is
    /// called.
    ///
    /// # Errors
    /// A server's name is not known, the volume cannot be opened, or a signal came before.
    pub(super) async fn open<T: Send + 'static>(
        self,
        signals: &mut Signals,
        purpose: Purpose,
        use_it: impl FnOnce(Volume) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, AbortOnDrop), Failure> {
        let name = self.name.clone();
        let opened = self.open_by(signals, move |shape, servers, options| {
            if options.take_over {
                look(&name, purpose, shape, servers, options)?;
            }
            use_it(Volume::open(shape, servers, options).map_err(|error| failure(&name, &error))?)
        });
        opened.await
    }

    /// The same for reading alone.
    ///
    /// # Errors
    /// As for [`Opening::open`].
    pub(super) async fn open_read_only<T: Send + 'static>(
        self,
        signals: &mut Signals,
        use_it: impl FnOnce(ReadOnly) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, AbortOnDrop), Failure> {
        let name = self.name.clone();
        let opened = self.open_by(signals, move |shape, servers, options| {
            let ClientOptions { security, reads, rdma, copy_limit: limit, .. } = options.clone();
            let opened = ReadOnly::open(shape, servers, &ReadOnlyOptions { security, reads, rdma, limit });
            let cure = if reads == Reads::Here { ELSEWHERE } else { "" };
            use_it(opened.map_err(|error| Failure::new(Code::Volume, format!("the volume {name}: {error}{cure}")))?)
        });
        opened.await
    }

    /// Does that by a thread that may wait, until a signal comes.
    async fn open_by<T: Send + 'static>(
        self,
        signals: &mut Signals,
        open: impl FnOnce(Shape, &[Address], &ClientOptions) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, AbortOnDrop), Failure> {
        let Opening { name, file, protection, options, rereading } = self;
        let opened = blocking(move || {
            let servers = protection.servers(&file.servers)?;
            let ways = [("--reads", options.reads.is_plain()), ("--writes", options.writes.is_plain())];
            for (option, _) in ways.iter().filter(|(_, is_plain)| *is_plain) {
                protection.check_plain(option, &servers)?;
            }
            open(file.shape, &servers, &options)
        });
        tokio::select! {
            opened = opened => Ok((opened?, rereading)),
            // The thread ends with the process. It has changed nothing but who may write.
            signal = signals.next() => {
                Err(Failure::new(Code::Interrupted, format!("stopped by {signal} before {name} was open")))
            }
        }
    }
}

/// Whether the volume holds what it is opened for, before the writer that has it open is replaced.
///
/// # Errors
/// It does not. Nothing was changed.
fn look(
    name: &str,
    purpose: Purpose,
    shape: Shape,
    servers: &[Address],
    options: &ClientOptions,
) -> Result<(), Failure> {
    let peek = Volume::peek(shape, servers, options).map_err(|error| failure(name, &error))?;
    let Some(peek) = peek else { return Ok(()) };
    match purpose.check(peek.blocks(), |run| peek.read(run)) {
        Ok(()) => Ok(()),
        // The opening itself says why.
        Err(FilesError::Blocks(why)) => {
            tracing::info!(volume = name, why, "what the volume holds could not be looked at before");
            Ok(())
        }
        Err(error) => Err(files_failure(name, &error).and("the writer that has it open goes on")),
    }
}

/// Why a client is not ready meanwhile.
pub(super) const IS_OPENED: &str = "the volume is being opened";

/// What to do if no server of this host can be read.
const ELSEWHERE: &str = "; servers on other hosts are read with --reads anywhere, and need --lanes or RDMA";

// Failure: how a volume ended, or why it is not open, and what to do.

/// What may have happened to servers, and where it is seen.
const TOO_FEW: &str = "; `remora volume status` shows each server: one that does not answer may come back, and one that is \
    `empty` was started again without its copy";

/// The end of a command for a volume with this name.
pub(super) fn failure(name: &str, error: &Error) -> Failure {
    let (code, cure) = match error {
        Error::Ended(End::Fenced { .. }) => (Code::Replaced, ""),
        Error::InUse { .. } => (Code::InUse, "; --take-over replaces it at once"),
        Error::Ended(End::TooFew { .. }) => (Code::Volume, TOO_FEW),
        _ => (Code::Volume, ""),
    };
    Failure::new(code, format!("the volume {name}: {error}{cure}"))
}

/// The end of a command whose volume has ended. If no copy is left, it says why each server was left out.
pub(super) fn ended(shown: &Shown, volume: &Volume, end: End) -> Failure {
    let failure = failure(&shown.file, &Error::Ended(end));
    if end != End::NoCopyLeft {
        return failure;
    }
    let why = |(place, server): (usize, &String)| Some(format!("{server}: {}", volume.left_out(ServerId(place))?));
    let all: Vec<_> = shown.servers.iter().enumerate().filter_map(why).collect();
    if all.is_empty() { failure } else { failure.and(&all.join("; ")) }
}

/// Why there are no files in the volume with this name, or it holds something else, and what to do.
pub(super) fn files_failure(name: &str, error: &FilesError) -> Failure {
    match error {
        FilesError::Disk(error) => failure(name, error),
        _ => Failure::new(Code::Volume, format!("the volume {name}: {error}")),
    }
}
