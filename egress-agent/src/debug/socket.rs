//! Both ends of the socket.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::debug::log::LogLevel;
use crate::debug::{Answer, Request, Sources};
use egress_core::display_names::Names;
use egress_datapath::events::drops::{DropFilter, DropLine};

/// Longest request (bytes).
const QUESTION: u64 = 4096;
/// Timeout of a request, and of its answer. Claims of addresses may keep the reconciler busy for a while.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Answers until `stop`. Without a socket the agent continues: only people need it.
pub async fn serve(sources: Sources, stop: CancellationToken) {
    let path = sources.questions.socket.clone();
    let listener = match listen(&path) {
        Ok(listener) => listener,
        Err(error) => {
            warn!(path = %path.display(), %error, "no socket for `egress-agent status`");
            return stop.cancelled().await;
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
                let stopped = stop.clone().cancelled_owned();
                // Short-lived: one connection.
                tokio::spawn(async move {
                    tokio::select! {
                        // Ends followed drops.
                        () = stopped => {}
                        outcome = answer(stream, &sources) => if let Err(error) = outcome {
                            debug!(%error, "a request was not answered");
                        },
                    }
                });
            }
            Err(error) => {
                debug!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    // A socket file that stays refuses connections, with the same result.
    if let Err(error) = fs::remove_file(&path) {
        debug!(%error, "the socket is gone already");
    }
}

/// This agent is the only one on its node by now, so an existing socket is a former one's.
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
    let (mut reader, mut writer) = stream.split();
    timeout(TIMEOUT, BufReader::new((&mut reader).take(QUESTION)).read_line(&mut question)).await??;
    let answer = match serde_json::from_str(&question) {
        Ok(Request::Status) => in_time(sources.status(), |status| Answer::Status(Box::new(status))).await,
        Ok(Request::Drops { follow, filter }) => {
            return sources.questions.drops.stream((follow, &filter), reader, writer).await;
        }
        Ok(Request::LogLevel { set }) => log_level(&sources.questions.log, set),
        Ok(Request::Attach(attach)) => in_time(sources.attach(attach), |refused| Answer::Attached { refused }).await,
        Ok(Request::Names) => in_time(sources.names(), |names| Answer::Names(Box::new(names))).await,
        Err(error) => Answer::Error(format!("the agent does not understand the request: {error}")),
    };
    writer.write_all(&serde_json::to_vec(&answer)?).await
}

fn log_level(log: &LogLevel, set: Option<String>) -> Answer {
    let Some(filter) = set else { return Answer::LogLevel(log.now()) };
    match log.change(&filter) {
        Ok(()) => {
            info!(%filter, "the log's level was changed");
            Answer::LogLevel(filter)
        }
        Err(why) => Answer::Error(why),
    }
}

/// The answer of a part of the agent, which may be busy or may have ended.
async fn in_time<T>(part: impl Future<Output = Option<T>>, answer: impl FnOnce(T) -> Answer) -> Answer {
    match timeout(TIMEOUT, part).await {
        Ok(Some(part)) => answer(part),
        Ok(None) => Answer::Error("the agent is stopping".to_owned()),
        Err(_) => Answer::Error("the agent is busy with its kernel; ask again".to_owned()),
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("no agent runs here, or not with this --socket ({path})", path = .0.display())]
    NoAgent(PathBuf),
    #[error("an agent runs here and does not answer: it is stopped, or hangs")]
    Silent,
    #[error("cannot connect to {path}: {source}; root is required", path = .path.display())]
    Refused { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Answered(String),
    #[error("the agent's answer cannot be read: is it of another version? {0}")]
    Unreadable(#[source] serde_json::Error),
}

impl AskError {
    /// Whether no agent runs here, or one that does not answer.
    pub const fn is_silence(&self) -> bool {
        matches!(self, Self::NoAgent(_) | Self::Silent)
    }

    fn of(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Self::NoAgent(path.to_owned()),
            _ => Self::Refused { path: path.to_owned(), source },
        }
    }
}

/// Shows sampled drops until the agent ends, or all remembered ones are shown. An error of `show` ends it too.
pub async fn drops(
    path: &Path,
    (follow, filter): (bool, DropFilter),
    mut show: impl AsyncFnMut(DropLine) -> io::Result<()>,
) -> Result<(), AskError> {
    let refused = |error| AskError::of(path, error);
    let mut stream = UnixStream::connect(path).await.map_err(refused)?;
    let (reader, mut writer) = stream.split();
    writer.write_all(&question(&Request::Drops { follow, filter }).map_err(refused)?).await.map_err(refused)?;
    let mut lines = BufReader::new(reader).lines();
    // A stopped agent sends nothing, and one without drops closes the connection, so the first line needs a timeout.
    let mut timeout_of_first = (!follow).then_some(TIMEOUT);
    loop {
        let next = match timeout_of_first.take() {
            Some(limit) => timeout(limit, lines.next_line()).await.map_err(|_| AskError::Silent)?,
            None => lines.next_line().await,
        };
        let line = match next {
            Ok(Some(line)) => line,
            // Killed in the middle of a line, or ended.
            Ok(None) | Err(_) => return Ok(()),
        };
        let line = serde_json::from_str(&line).map_err(|error| match serde_json::from_str(&line) {
            Ok(Answer::Error(text)) => AskError::Answered(text),
            _ => AskError::Unreadable(error),
        })?;
        show(line).await.map_err(refused)?;
    }
}

pub async fn ask(path: &Path, request: Request) -> Result<Answer, AskError> {
    let answered = timeout(TIMEOUT + Duration::from_millis(500), exchange(path, request)).await;
    let bytes = answered.map_err(|_| AskError::Silent)?.map_err(|source| AskError::of(path, source))?;
    match serde_json::from_slice(&bytes).map_err(AskError::Unreadable)? {
        Answer::Error(text) => Err(AskError::Answered(text)),
        answer => Ok(answer),
    }
}

/// The agent's names of pods, objects and nodes.
pub async fn names(path: &Path) -> Result<Names, AskError> {
    match ask(path, Request::Names).await? {
        Answer::Names(names) => Ok(*names),
        _ => Err(AskError::Answered("the agent sends an unexpected answer".to_owned())),
    }
}

async fn exchange(path: &Path, request: Request) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(path).await?;
    stream.write_all(&question(&request)?).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(answer)
}

fn question(request: &Request) -> io::Result<Vec<u8>> {
    let mut question = serde_json::to_vec(request)?;
    question.push(b'\n');
    Ok(question)
}
