//! `egress-agent status --watch`: the same page again and again, in place on a terminal. Ctrl-C ends it, over `kubectl exec -it`
//! too, where it arrives as SIGINT.

use std::io::{self, Write};
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use egress_terminal::page::{Page, Severity, complain};
use egress_terminal::screen::Screen;
use jiff::Timestamp;
use tokio::time::{MissedTickBehavior, interval};

use crate::cmd::CliError;
use crate::cmd::page::{Output, end_of_input};
use crate::cmd::status::{Answered, NothingHere, StatusArgs, answered, table};

pub(super) async fn run(args: &StatusArgs, seconds: u64) -> Result<ExitCode, CliError> {
    let mut tick = interval(Duration::from_secs(seconds));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let screen = (args.page.output == Output::Table).then(Screen::of_stdout).flatten();
    let mut end = pin!(end_of_input(args.end_with_stdin));
    let outcome = loop {
        tokio::select! {
            () = &mut end => break Ok(()),
            interrupted = tokio::signal::ctrl_c() => break interrupted,
            _ = tick.tick() => {}
        }
        let answer = answered(&args.page).await;
        let shown = match (&screen, args.page.output) {
            (Some(screen), _) => screen.show(&whole(&answer, (SystemTime::now(), seconds))),
            (None, output) => follow(&answer, output, SystemTime::now()),
        };
        if let Err(error) = shown {
            break Err(error);
        }
    };
    match outcome {
        Ok(()) => {
            if screen.is_some() {
                println!();
            }
            Ok(ExitCode::SUCCESS)
        }
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        Err(error) => Err(error.into()),
    }
}

fn time(now: SystemTime) -> String {
    format!("{:.0}", Timestamp::try_from(now).unwrap_or_default())
}

/// A screen: the silence of an agent is on it, since standard error would disturb it.
fn whole(answer: &Result<Answered, NothingHere>, (now, seconds): (SystemTime, u64)) -> Page {
    let mut page = Page::default();
    page.push(None, format!("{}, every {seconds} s; Ctrl-C ends it", time(now)));
    match answer {
        Ok(answered) => {
            if let Some(line) = answered.silence() {
                page.push(Severity::Error, format!("error: {line}"));
            }
            page.append(table(&answered.status));
        }
        Err(nothing) => page.push(Severity::Error, format!("error: {nothing}")),
    }
    page
}

/// Elsewhere: one page after the other, each with its time, or one JSON object per line.
fn follow(answer: &Result<Answered, NothingHere>, output: Output, now: SystemTime) -> io::Result<()> {
    let line = match answer {
        Ok(answered) => answered.silence(),
        Err(nothing) => Some(nothing.to_string()),
    };
    if let Some(line) = line {
        complain(Severity::Error, &format!("error: {line}"));
    }
    let Ok(answered) = answer else { return Ok(()) };
    if output == Output::Json {
        return writeln!(io::stdout().lock(), "{}", serde_json::to_string(&answered.complete())?);
    }
    let mut page = Page::plain(&time(now));
    page.append(table(&answered.status));
    page.push(None, "");
    page.print()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debug::Status;
    use crate::debug::socket::AskError;

    #[test]
    fn a_screen_has_the_time_and_then_the_silence_of_the_agent() {
        let at = (SystemTime::UNIX_EPOCH, 5);
        let of = |silence| whole(&Ok(Answered { status: Status::default(), silence }), at).text();
        assert!(of(None).starts_with("1970-01-01T00:00:00Z, every 5 s; Ctrl-C ends it\nagent "), "{}", of(None));
        let dead = of(Some(AskError::Silent));
        assert_eq!(
            dead.lines().nth(1).map(|line| line.starts_with("error: an agent runs here and does not")),
            Some(true)
        );
        assert_eq!(dead.lines().nth(2), Some("agent        does not answer"));
    }
}
