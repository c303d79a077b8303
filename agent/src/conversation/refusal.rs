//! Answers to connections that get no conversation.

use remora_messenger::handshake;
use remora_protocol::REFUSED_AS_BUSY;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{LINGER, VERSIONS};

/// Refuses a connection because there is no room for it, reads nothing from it, and closes it. The peer gets
/// [`Fault::Busy`](super::Fault::Busy). Takes at most a second.
pub async fn turn_away(stream: TcpStream) {
    refuse(stream, REFUSED_AS_BUSY, "").await;
}

/// Refuses a connection because it has no TLS, and closes it. The peer, which may be of an earlier version, shows the
/// text. `option`: the value of `--security` that it needs.
pub(super) async fn refuse_plaintext(stream: TcpStream, option: &str) {
    let text = format!("this agent accepts TLS only: start the other one with --security {option}");
    refuse(stream, REFUSED_AS_PLAINTEXT, &text).await;
}

async fn refuse(mut stream: TcpStream, code: u8, text: &str) {
    let said = async {
        stream.write_all(&handshake::refuse(code, text, VERSIONS)).await?;
        stream.shutdown().await?;
        let mut piece = [0; TURNED_AWAY_PIECE_BYTES];
        while stream.read(&mut piece).await? > 0 {} // closing with unread bytes would discard the refusal
        std::io::Result::Ok(())
    };
    let _ = timeout(LINGER, said).await; // best effort: the outcome does not matter
}

/// The code of a refusal because the connection has no TLS. Callers that may choose connect again with TLS.
pub(super) const REFUSED_AS_PLAINTEXT: u8 = REFUSED_AS_BUSY + 1;

/// Size of a read from a peer that was refused.
const TURNED_AWAY_PIECE_BYTES: usize = 512;
