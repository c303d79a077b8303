//! The callback of the server's loader for one of our fields in a snapshot.

use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;

use remora_redis::rdb::reference::{Word, WordError, words};

use super::strings::StringError;
use super::{Armed, Busy, COUNTS};
use crate::api::{AuxLoad, Io, LogLevel};

/// The module type that exists for these fields.
pub(super) struct References;

impl AuxLoad for References {
    const TYPE_NAME: &'static CStr = c"RemoraRef";
    const ENCODING: u16 = remora_redis::rdb::reference::VERSION;

    fn load(io: &Io<'_>, _encoding: u16) -> bool {
        // Taken out of the cell while it is used: the server may call us again when we yield.
        let Some(mut armed) = Armed::take() else {
            warn(io, "the snapshot contains memory references, but no memory was handed over (REMORA.LOAD)");
            return false;
        };
        let busy = Busy::begin();
        let result = armed.execute(io);
        match &result {
            Ok(()) => {
                armed.page.count();
                armed.context.yield_now(true, c"loading a snapshot out of shared memory");
            }
            Err(error) => {
                let text = error.to_string();
                armed.page.refuse(&text);
                warn(io, &text);
            }
        }
        armed.put();
        drop(busy);
        result.is_ok()
    }
}

const _: () = assert!(
    const_equal(References::TYPE_NAME.to_bytes(), remora_redis::rdb::reference::TYPE_NAME.as_bytes()),
    "the type's name is the one that agents write"
);

const fn const_equal(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// Why a load fails.
#[derive(Debug, thiserror::Error)]
enum FieldError {
    #[error("the snapshot breaks off inside a field of references")]
    CutOff,
    #[error(transparent)]
    Word(#[from] WordError),
    #[error("the snapshot refers to other memory than was handed over: an agent that was replaced sent it")]
    Ticket,
    #[error("the field of references lacks its first word")]
    NoHello,
    #[error(
        "the server loads into a data set that it does not serve yet (repl-diskless-load is {0}), where a module \
         can't create keys"
    )]
    Aside(String),
    #[error(transparent)]
    String(#[from] StringError),
}

impl Armed {
    fn execute(&mut self, io: &Io<'_>) -> Result<(), FieldError> {
        let bytes = io.bytes().ok_or(FieldError::CutOff)?;
        for word in words(&bytes) {
            match word? {
                Word::Hello { ticket } => self.begin(&ticket)?,
                _ if !self.begun => return Err(FieldError::NoHello),
                word => self.strings.execute(&self.context, &word)?,
            }
        }
        let (keys, bytes) = self.strings.take_counts();
        COUNTS.keys.fetch_add(keys, Relaxed);
        COUNTS.bytes.fetch_add(bytes, Relaxed);
        Ok(())
    }

    fn begin(&mut self, ticket: &[u8]) -> Result<(), FieldError> {
        if ticket != self.ticket {
            return Err(FieldError::Ticket);
        }
        // Checked again: the setting may have changed since the memory was handed over. It can't change while the
        // server is loading.
        let way = self.context.setting("repl-diskless-load").unwrap_or_default();
        if way == "swapdb" {
            return Err(FieldError::Aside(way));
        }
        self.begun = true;
        Ok(())
    }
}

fn warn(io: &Io<'_>, text: &str) {
    if let Some(context) = io.context() {
        context.log(LogLevel::Warning, text);
    }
}
