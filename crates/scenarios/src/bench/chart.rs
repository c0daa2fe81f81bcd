//! The chart: every work and path as a group of bars, as long as its ratio to plain forwarding (no bar: not measured);
//! below, nanoseconds per packet of single programs.

use std::fmt::Write as _;

use super::plan::Peer;
use super::report::figure;
use super::samples::{Cell, Results};

const LEFT: f64 = 300.0;
const RIGHT: f64 = 760.0;
const BAR: f64 = 14.0;
/// How many times plain forwarding the axis shows.
const GREATEST_RATIO: f64 = 2.0;

pub(super) fn svg(results: &Results) -> String {
    let mut body = String::new();
    let mut y = 40.0;
    let compared =
        results.cells.iter().filter(|cell| results.cell(&cell.work, cell.path, Peer::Plain.name()).is_some());
    let compared: Vec<&Cell> = compared.collect();
    let top = y;
    let mut group = None;
    for cell in &compared {
        let here = Some((&cell.work, cell.path));
        if group != here {
            y += 8.0;
            label(&mut body, y, &format!("{}, {}", cell.work, cell.path));
            group = here;
        }
        let ratio = results.ratio(cell, Peer::Plain).unwrap_or(0.0);
        let note = format!("{} {} {} ({ratio:.2})", cell.peer, figure(cell.median()), cell.unit);
        bar(&mut body, y, ratio / GREATEST_RATIO, color(cell.peer), &note);
        y += BAR + 2.0;
    }
    if !compared.is_empty() {
        let x = LEFT + (RIGHT - LEFT) / GREATEST_RATIO;
        // Writing to a String cannot fail.
        let _ =
            writeln!(body, r##"<line x1="{x}" x2="{x}" y1="{top}" y2="{y}" stroke="#333" stroke-dasharray="3 3"/>"##);
    }
    let single: Vec<&Cell> = results.cells.iter().filter(|cell| cell.unit == "ns").collect();
    let longest = single.iter().map(|cell| cell.median()).fold(1.0, f64::max);
    y += 30.0;
    for cell in single {
        label(&mut body, y, &format!("{}, {}", cell.work, cell.path));
        bar(&mut body, y, cell.median() / longest, color(cell.peer), &format!("{} ns", figure(cell.median())));
        y += BAR + 2.0;
    }
    let (width, height) = (RIGHT + 240.0, y + 20.0);
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="24" font-size="14">relative to plain forwarding (dashed line: 1.0); programs in ns per packet</text>
{body}</svg>
"##
    )
}

fn color(peer: &str) -> &'static str {
    match peer {
        "plain" => "#9aa5b1",
        "netfilter" => "#d08770",
        _ => "#2f6f9f",
    }
}

fn label(body: &mut String, y: f64, text: &str) {
    let _ = writeln!(body, r#"<text x="{}" y="{}" text-anchor="end">{text}</text>"#, LEFT - 8.0, y + BAR - 3.0);
}

fn bar(body: &mut String, y: f64, part: f64, color: &str, note: &str) {
    let width = ((RIGHT - LEFT) * part).clamp(0.0, RIGHT - LEFT);
    let _ = writeln!(body, r#"<rect x="{LEFT}" y="{y}" width="{width:.1}" height="{BAR}" fill="{color}"/>"#);
    let _ = writeln!(body, r#"<text x="{:.1}" y="{}">{note}</text>"#, LEFT + width + 6.0, y + BAR - 3.0);
}
