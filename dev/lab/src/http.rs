//! One question by HTTP, for pages that our programs and Prometheus serve.

// Stands alone: tests of pages need it without the rest of `prometheus`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::error::{Doing, Error, Result};

/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Asks for a page, by HTTP/1.0: the answer ends with the connection. `accept`: the header of that name; empty: none.
/// Returns the status, the head, and the text.
///
/// # Errors
/// The server cannot be reached, or what it answers is not HTTP.
pub fn get(address: SocketAddr, path: &str, accept: &str) -> Result<Page> {
    let asked = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let accept = if accept.is_empty() { String::new() } else { format!("Accept: {accept}\r\n") };
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n{accept}\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    let answer = asked().doing(|| format!("get http://{address}{path}"))?;
    let parts = answer.split_once("\r\n\r\n").and_then(|(head, text)| {
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some(Page { status, head: head.to_owned(), text: text.to_owned() })
    });
    parts.ok_or(Error::Garbled(answer))
}

/// What a server answers.
#[derive(Clone, Debug)]
pub struct Page {
    /// Its code, such as 200.
    pub status: u16,
    /// The status line and the headers.
    pub head: String,
    /// The page.
    pub text: String,
}

/// A text as part of an address.
pub(crate) fn quoted(text: &str) -> String {
    let quote = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(quote).collect()
}
