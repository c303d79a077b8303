//! Pipelines of commands with arguments of several types.

use remora_redis::resp::Frame;

use crate::client::{Client, shown_bytes};
use crate::error::{Error, Result};

/// Adds one command to a [`Commands`]: `say!(commands, "SET", key, 5)`.
macro_rules! say {
    ($commands:expr, $($word:expr),+ $(,)?) => {{
        // The arguments first: they may borrow from the owner of `$commands`.
        let command = vec![$($crate::workload::commands::Word::into_bytes($word)),+];
        $commands.push(command)
    }};
}
pub(crate) use say;

/// A value that can be an argument of a command.
pub(crate) trait Word {
    /// The bytes sent to the server.
    fn into_bytes(self) -> Vec<u8>;
}

impl Word for &str {
    fn into_bytes(self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

impl Word for &[u8] {
    fn into_bytes(self) -> Vec<u8> {
        self.to_vec()
    }
}

impl Word for Vec<u8> {
    fn into_bytes(self) -> Vec<u8> {
        self
    }
}

impl Word for &Vec<u8> {
    fn into_bytes(self) -> Vec<u8> {
        self.clone()
    }
}

macro_rules! printed_words {
    ($($kind:ty),+) => {
        $(impl Word for $kind {
            fn into_bytes(self) -> Vec<u8> {
                self.to_string().into_bytes()
            }
        })+
    };
}
printed_words!(u32, u64, i64, f64, String, &String);

/// Commands in order.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    list: Vec<Vec<Vec<u8>>>,
}

impl Commands {
    /// Adds a command; `say!` is usually shorter.
    pub(crate) fn push(&mut self, command: Vec<Vec<u8>>) {
        self.list.push(command);
    }

    /// Adds a command with any number of further arguments.
    pub(crate) fn push_with(&mut self, head: &[&str], words: impl IntoIterator<Item = Vec<u8>>) {
        let mut command: Vec<Vec<u8>> = head.iter().map(|word| word.as_bytes().to_vec()).collect();
        command.extend(words);
        self.list.push(command);
    }

    /// The number of commands.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Sends the commands and returns their answers. Errors of the server are frames. The list is empty afterwards.
    pub(crate) fn run(&mut self, client: &mut Client) -> Result<Vec<Frame>> {
        let list = std::mem::take(&mut self.list);
        for command in &list {
            client.queue(command);
            // Never more in memory at once than one buffer and one command.
            if client.queued() >= SEND_BYTES {
                client.flush()?;
            }
        }
        list.iter().map(|_| client.receive()).collect()
    }

    /// Sends the commands, and fails at the first error of the server.
    pub(crate) fn run_all(&mut self, client: &mut Client) -> Result<()> {
        let names: Vec<String> = self.list.iter().map(|command| named(command)).collect();
        let answers = self.run(client)?;
        match names.into_iter().zip(answers).find(|(_, answer)| matches!(answer, Frame::Error(_))) {
            Some((command, Frame::Error(text))) => {
                Err(Error::Refused { command, reply: String::from_utf8_lossy(&text).into_owned() })
            }
            _ => Ok(()),
        }
    }
}

fn named(command: &[Vec<u8>]) -> String {
    command.iter().take(3).map(|word| shown_bytes(word)).collect::<Vec<_>>().join(" ")
}

/// Bytes to encode before they are sent.
const SEND_BYTES: usize = 1 << 20;
