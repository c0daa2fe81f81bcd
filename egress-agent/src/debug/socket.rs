//! Both ends of the socket.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::debug::log::LogLevel;
use crate::debug::{Answer, Request, Sources};
use egress_core::display_names::Names;
use egress_datapath::events::drops::{DropFilter, DropLine};

/// Longest request (bytes). One for drops lists the addresses of a pod or an object.
const QUESTION: u64 = 1 << 20;
const TOO_LONG: &str = "the request is longer than 1024 KiB: filter by fewer addresses";
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
    let (mut reader, mut writer) = stream.split();
    let answer = match timeout(TIMEOUT, request(&mut reader)).await?? {
        Ok(Request::Status) => in_time(sources.status(), |status| Answer::Status(Box::new(status))).await,
        Ok(Request::Drops { follow, filter }) => {
            return sources.questions.drops.stream((follow, &filter), reader, writer).await;
        }
        Ok(Request::LogLevel { set }) => log_level(&sources.questions.log, set),
        Ok(Request::Attach(attach)) => in_time(sources.attach(attach), |refused| Answer::Attached { refused }).await,
        Ok(Request::Names) => in_time(sources.names(), |names| Answer::Names(Box::new(names))).await,
        Err(why) => Answer::Error(why),
    };
    writer.write_all(&serde_json::to_vec(&answer)?).await
}

/// Reads one, or says why it is none.
async fn request(reader: impl AsyncRead + Unpin) -> io::Result<Result<Request, String>> {
    let mut line = String::new();
    let length = BufReader::new(reader.take(QUESTION)).read_line(&mut line).await?;
    if length as u64 == QUESTION && !line.ends_with('\n') {
        return Ok(Err(TOO_LONG.to_owned()));
    }
    let read = serde_json::from_str(&line);
    Ok(read.map_err(|error| format!("the agent does not understand the request: {error}")))
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
    #[error("cannot ask the agent by {path}: {source}{why}", path = .path.display(), why = if source.kind() == io::ErrorKind::PermissionDenied { "; root is required" } else { "" })]
    Refused { path: PathBuf, source: io::Error },
    #[error("{TOO_LONG}")]
    TooLong,
    #[error("{0}")]
    Answered(String),
    #[error("the request cannot be written: {0}")]
    Unwritten(#[source] serde_json::Error),
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
    writer.write_all(&question(&Request::Drops { follow, filter })?).await.map_err(refused)?;
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
    let question = question(&request)?;
    let answered = timeout(TIMEOUT + Duration::from_millis(500), exchange(path, question)).await;
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

async fn exchange(path: &Path, question: Vec<u8>) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(path).await?;
    stream.write_all(&question).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(answer)
}

fn question(request: &Request) -> Result<Vec<u8>, AskError> {
    let mut question = serde_json::to_vec(request).map_err(AskError::Unwritten)?;
    question.push(b'\n');
    if question.len() as u64 > QUESTION { Err(AskError::TooLong) } else { Ok(question) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{IpAddr, Ipv6Addr};

    use super::*;

    /// An object may have many addresses.
    fn drops_of(addresses: u128) -> Request {
        let end: BTreeSet<IpAddr> =
            (0..addresses).map(|number| Ipv6Addr::from_bits(u128::MAX - number).into()).collect();
        Request::Drops { follow: true, filter: DropFilter { ends: vec![end], ..DropFilter::default() } }
    }

    #[tokio::test]
    async fn a_long_filter_is_read_whole() {
        let asked = question(&drops_of(10_000)).expect("short enough");
        assert!(asked.len() > 400_000, "{}", asked.len());
        let Ok(Request::Drops { filter, .. }) = request(&asked[..]).await.expect("read") else { panic!("another") };
        assert_eq!(filter.ends[0].len(), 10_000);
    }

    #[tokio::test]
    async fn a_request_that_is_too_long_says_so_on_both_ends() {
        let error = question(&drops_of(100_000)).expect_err("too long").to_string();
        let endless = vec![b'x'; 2 << 20];
        let answered = request(&endless[..]).await.expect("read").expect_err("too long");
        assert_eq!((error.as_str(), answered.as_str()), (TOO_LONG, TOO_LONG));
        assert!(answered.contains("1024 KiB"), "{answered}");
        let other = request(&b"{}\n"[..]).await.expect("read").expect_err("no request");
        assert!(other.starts_with("the agent does not understand the request: "), "{other}");
    }
}
