//! The socket, at both ends.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{Answer, Request, Sources};

/// Longest question (bytes).
const QUESTION: u64 = 4096;
/// How long a question, and an answer, may take. Claims of addresses may keep the node's half busy for a while.
const PATIENCE: Duration = Duration::from_secs(3);

/// Answers until told to stop. Without a socket the agent goes on: it is for people.
pub async fn serve(path: &Path, sources: Sources, stop: CancellationToken) {
    let listener = match listen(path) {
        Ok(listener) => listener,
        Err(error) => {
            warn!(path = %path.display(), %error, "no socket for `egress-agent status`");
            return;
        }
    };
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match stream {
            Ok((stream, _)) => {
                let sources = sources.clone();
                tokio::spawn(async move {
                    if let Err(error) = answer(stream, &sources).await {
                        debug!(%error, "a question was not answered");
                    }
                });
            }
            Err(error) => {
                debug!(%error, "cannot take a question");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    // One that is left refuses connections, which says the same.
    if let Err(error) = fs::remove_file(path) {
        debug!(%error, "the socket is gone already");
    }
}

/// The agent is the only one of its node by now, so that what is there is a former one's.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent().filter(|folder| !folder.exists()) {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn answer(mut stream: UnixStream, sources: &Sources) -> io::Result<()> {
    let mut question = String::new();
    let (reader, mut writer) = stream.split();
    timeout(PATIENCE, BufReader::new(reader.take(QUESTION)).read_line(&mut question)).await??;
    let answer = match serde_json::from_str(&question) {
        Ok(Request::Status) => match timeout(PATIENCE, sources.status()).await {
            Ok(Some(status)) => Answer::Status(Box::new(status)),
            Ok(None) => Answer::Error("the agent is stopping".to_owned()),
            Err(_) => Answer::Error("the agent is busy with its kernel; ask again".to_owned()),
        },
        Err(error) => Answer::Error(format!("this is no question for an agent: {error}")),
    };
    writer.write_all(&serde_json::to_vec(&answer)?).await
}

/// Why nobody has answered.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("no agent runs here, or not with this --socket ({path})", path = .0.display())]
    Nobody(PathBuf),
    #[error("an agent is there and does not answer: it is stopped, or hangs")]
    Silence,
    #[error("{path} cannot be asked: {source}; it takes root", path = .path.display())]
    Refused { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Answered(String),
    #[error("the agent's answer cannot be read: is it of another version? {0}")]
    Unreadable(#[source] serde_json::Error),
}

pub async fn ask(path: &Path, request: Request) -> Result<Answer, AskError> {
    let asked = timeout(PATIENCE + Duration::from_millis(500), exchange(path, request)).await;
    let bytes = asked.map_err(|_| AskError::Silence)?.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => AskError::Nobody(path.to_owned()),
        _ => AskError::Refused { path: path.to_owned(), source },
    })?;
    match serde_json::from_slice(&bytes).map_err(AskError::Unreadable)? {
        Answer::Error(text) => Err(AskError::Answered(text)),
        answer => Ok(answer),
    }
}

async fn exchange(path: &Path, request: Request) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(path).await?;
    let mut question = serde_json::to_vec(&request)?;
    question.push(b'\n');
    stream.write_all(&question).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(answer)
}
