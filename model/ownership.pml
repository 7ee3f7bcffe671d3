/* The ownership protocol of jsworker for ONE job: NW worker processes, NR publishers and sweepers, an
 * operator, a broker and a clock that may all misbehave within a budget. Every statement of
 * jsworker/ownership is one atomic step (one guarded UPDATE under READ COMMITTED); everything a process remembers between two statements is a variable that may go stale.
 *
 * Abstractions that lose nothing here:
 *  - dispatch is only ever compared with the row's current one, so a remembered dispatch is one bit,
 *    CUR or OLD, and bump() (dispatch+1) turns every CUR into OLD.
 *  - a worker id is new in every life, so at a crash the row's owner becomes GONE (an id nobody has).
 *  - the publish_after lease may run out at any moment: it is modelled as not there.
 *  - `late` = the reset predicate holds (rule 1, rule 2 or 3). Free when nobody renews the row; for a
 *    row that its owner does renew it is a fault and costs budget (pause, partition, false witness,
 *    operator's clear).
 * Protections are on by default; check.py knows the flags that remove them. Workers are pids 0 and 1. */
#define NW 2        /* worker processes */
#ifndef NR
#define NR 1        /* publishers (relay, after-commit fast path), and as many resetting sweepers */
#endif
#ifndef K
#define K 3         /* faults in all, of any kind: crash (worker, publisher), false suspicion of a renewing owner,
                     * lost answer, lost message, message out of nowhere, RELEASE of a healthy run */
#endif
#define MAXX 1      /* CANCEL calls */
#ifndef MAXY
#define MAXY 0      /* RETRY calls by the operator */
#endif
#ifndef MAXA
#define MAXA 2      /* max_attempts */
#endif
#ifndef MAXS
#define MAXS 3      /* max_stalls */
#endif

/* Removed protections, -D<NAME>; the others are #ifdefs at their place. */
#ifndef COMPLETE_BLIND
#define COMPLETE_BLIND 0
#endif
#ifndef COPY_ACK
#define COPY_ACK 0
#endif
#ifndef MARK_BLIND
#define MARK_BLIND 0
#endif
#ifndef RESET_IGNORES_CANCEL
#define RESET_IGNORES_CANCEL 0
#endif
#ifndef RESET_BLIND
#define RESET_BLIND 0
#endif
#ifndef NO_OUTBOX
#define NO_OUTBOX 0
#endif
#ifndef RELEASE_IGNORES_CANCEL
#define RELEASE_IGNORES_CANCEL 0
#endif
#ifndef EV_ONCE
#define EV_ONCE 0
#endif
#ifndef MSGID_JOB
#define MSGID_JOB 0
#endif

mtype = { SCHED, QUEUED, PROC, COMPL, FAILED, CANC };                       /* jobs.status */
mtype = { IDLE, CLAIM, UNCLEAR, READ, RUN, SETTLE, ACK };                   /* a worker's phase */
#define NONE 0
#define OLD  1      /* a message, or a remembered dispatch, older than the row's */
#define CUR  2
#define GONE 9      /* the worker id of a dead process */

/* the row */
mtype st = QUEUED;  byte owner = 0, tok = 0, att = 0, err = 0, stl = 0;
bool creq = 0, late = 0;
bool np = !NO_OUTBOX, owe = NO_OUTBOX;   /* ENQUEUE: row and needs_publish in one commit; else a publish owed from memory */
/* the broker: copies waiting for delivery; pubd = this Nats-Msg-Id is in the duplicate window */
byte cur = 0, old = 0;  bool pubd = 0;
/* the workers (index 1..NW) */
mtype ph[3] = IDLE;  mtype want[3] = COMPL;  byte hold[3] = NONE;  byte hand[3] = 0;  byte rb[3] = 0;
byte rd[3] = OLD;    /* the dispatch its run was claimed at, as CLAIM or the read-back returned it */
byte fly = 0;       /* a CLAIM given up by its caller that may still commit: its worker id */
/* publishers, sweepers */
byte rel[NR] = NONE;  bool sent[NR] = 0;  byte seen[NR] = 0;  bool rp = 0, ev = 0, cx = 0;
/* budgets used; ghosts: completions, first final state, cancel accepted, highest token */
byte n = 0, nx = 0, ny = 0;
byte done = 0, top = 0;  mtype fin = PROC;  bool cxl = 0;

#define FINAL     (st==COMPL || st==FAILED || st==CANC)
#define ALIVE     (owner!=0 && owner!=GONE)
#ifdef SLOTS      /* variant: workers 1 and 2 are two slots of ONE process, with one worker id */
#define ID(w)     1
#define INHAND    (hand[1]==tok || hand[2]==tok)
#define OTHER(w)  (hand[3-(w)]!=0)
#else
#define ID(w)     (w)
#define INHAND    (hand[owner]==tok)
#define OTHER(w)  false
#endif
#define MINE(w)   (st==PROC && owner==ID(w) && tok==hand[w])
#ifdef HB_ID      /* heartbeat by worker id alone renews whatever carries my name */
#define RENEWED   (ALIVE)
#else
#define RENEWED   (ALIVE && INHAND)
#endif
#define DEADOWNER (owner==GONE && (ev || !EV_ONCE))
#define GONE_MSG  (cur==0 && hold[1]!=CUR && hold[2]!=CUR)

/* Invariants, after every write to the row. */
inline check() {
  assert(att == err + stl + (st==COMPL || st==PROC));       /* S6 conservation */
  assert(!creq || (st!=QUEUED && st!=SCHED));               /* cancel_requested */
  assert(!np || st==QUEUED);                                /* needs_publish */
  assert((owner!=0) == (st==PROC));                         /* S4 */
  assert(err<=MAXA && stl<=MAXS);                           /* S8 */
  assert(done<=1);                                          /* S2 */
  if :: fin!=PROC -> assert(st==fin) :: else ->             /* S1 */
        if :: FINAL -> fin=st :: else fi fi }

inline bump() {                                             /* dispatch+1 */
  old=old+cur; cur=0; rp=0;
  pubd = pubd && MSGID_JOB;
  if :: hold[1]==CUR -> hold[1]=OLD :: else fi; if :: hold[2]==CUR -> hold[2]=OLD :: else fi;
  rd[1]=OLD; rd[2]=OLD;
  if :: rel[0]==CUR -> rel[0]=OLD :: else fi;
  if :: rel[NR-1]==CUR -> rel[NR-1]=OLD :: else fi
}
inline requeue() { bump(); st=QUEUED; np=!NO_OUTBOX; owe=NO_OUTBOX }
inline take(w) {                                            /* the writes of CLAIM */
  assert(!cxl);                                             /* L4: no claim after an accepted CANCEL */
  tok++; assert(tok>top); top=tok;                              /* S3 */
  att++; owner=w; late=0; st=PROC;
#ifndef CLAIM_KEEPS_NP
  np=0;
#endif
  check() }
inline claim(w, ok) { ok=0;
  if :: st==QUEUED -> take(w); ok=1
#ifdef CLAIM_LIVE                                           /* takes a job whatever its owner does */
     :: st==PROC -> assert(late || !RENEWED); stl++; take(w); ok=1
#else
     :: st==PROC && late && stl==0 && stl<MAXS-1 && !creq -> stl++; take(w); ok=1  /* stale-owner arm */
#endif
     :: else fi }
inline release() { owner=0; late=0;                         /* guard: mine, by the caller */
  att--;
  if :: creq && !RELEASE_IGNORES_CANCEL -> st=CANC :: else ->
     if :: requeue() :: st=SCHED fi                         /* SCHED: a server's fault, or SNOOZE */
  fi; check() }
inline fail() { owner=0; late=0;
  if :: creq -> att--; st=CANC
     :: !creq -> err++; if :: err>=MAXA -> st=FAILED :: else -> st=SCHED fi
     :: stl>=MAXS-1 -> stl++; if :: creq -> st=CANC :: else -> st=FAILED fi      /* a crash in quarantine */
  fi; check() }
inline complete() { done++; owner=0; late=0; st=COMPL; check() }
inline settle(w) {                                          /* zero rows = lost, or completed by me before */
  if :: want[w]==COMPL && (MINE(w) || COMPLETE_BLIND) -> complete()
     :: want[w]==FAILED && (MINE(w) || COMPLETE_BLIND) -> fail()
     :: want[w]==QUEUED && MINE(w) -> release()
     :: else fi }
inline giveback(w) {                                        /* nak, or ack_wait after a death */
  if :: hold[w]==CUR -> cur++ :: hold[w]==OLD -> old++ :: else fi; hold[w]=NONE }

#define START(w) ph[w]=RUN; assert(hand[1]!=hand[2])       /* one token, one run */
active [NW] proctype Worker() {
  bool ok;
#define w (_pid+1)
#define me ID(_pid+1)
  do
  /* --- delivery, idle poll */
  :: atomic { ph[w]==IDLE && !OTHER(w) && cur>0 -> cur--; hold[w]=CUR; ph[w]=CLAIM }
  :: atomic { ph[w]==IDLE && !OTHER(w) && old>0 -> old--; hold[w]=OLD; ph[w]=CLAIM }
#ifndef NO_POLL
  :: atomic { ph[w]==IDLE && !OTHER(w) && st==QUEUED -> ph[w]=CLAIM }
#endif
  /* --- CLAIM: answered; answer lost after the commit; never executed; may still commit later */
  :: atomic { ph[w]==CLAIM -> claim(me, ok);
       if :: ok -> hand[w]=tok; rd[w]=CUR; START(w);
#ifdef ACK_EARLY
                   hold[w]=NONE
#endif
          :: else -> ph[w]=ACK fi; ok=0 }                   /* skip and ack */
  :: atomic { ph[w]==CLAIM && n<K -> n++; claim(me, ok); ok=0; ph[w]=UNCLEAR }
  :: atomic { ph[w]==CLAIM && n<K -> n++; ph[w]=UNCLEAR }
  :: atomic { ph[w]==CLAIM && n<K && fly==0 -> n++; fly=me; ph[w]=UNCLEAR }
#ifdef ACK_UNCLEAR
  :: atomic { ph[w]==UNCLEAR -> hold[w]=NONE; ph[w]=IDLE }
#else
  :: atomic { ph[w]==UNCLEAR && st==PROC && owner==me -> rb[w]=tok; rd[w]=CUR; ph[w]=READ }
#ifdef ADOPT_BLIND
  :: atomic { ph[w]==READ -> hand[w]=rb[w]; rb[w]=0; START(w) }
#else
  :: atomic { ph[w]==READ -> if :: OTHER(w) -> rd[w]=OLD; ph[w]=ACK :: else -> hand[w]=rb[w]; START(w) fi; rb[w]=0 }
#endif
  :: atomic { ph[w]==UNCLEAR -> giveback(w); ph[w]=IDLE }   /* nothing there, or database silent: nak */
#endif
  /* --- while it runs: HEARTBEAT with explicit token; another copy of a job in hand is acked */
  :: atomic { (ph[w]==RUN || ph[w]==SETTLE) && MINE(w) && late -> late=0 }
#ifdef HB_ID
  :: atomic { st==PROC && owner==me && late -> late=0 }
#else
  :: atomic { ph[w]==RUN && !MINE(w) -> hand[w]=0; rd[w]=OLD; ph[w]=ACK }  /* lost, the database said so */
#endif
#ifndef DEAF
  :: atomic { ph[w]==RUN && MINE(w) && creq -> want[w]=FAILED; ph[w]=SETTLE }
#endif
  :: atomic { (ph[w]==RUN || ph[w]==SETTLE) && old>0 -> old-- }
  :: atomic { (ph[w]==RUN || ph[w]==SETTLE) && cur>0 && (rd[w]==CUR || COPY_ACK) -> cur-- }
  /* --- the run ends */
#ifndef HANG
  :: atomic { ph[w]==RUN -> want[w]=COMPL; ph[w]=SETTLE }
  :: atomic { ph[w]==RUN -> want[w]=FAILED; ph[w]=SETTLE }
#endif
  :: atomic { ph[w]==RUN && n<K -> n++; want[w]=QUEUED; ph[w]=SETTLE }
  :: atomic { ph[w]==SETTLE -> settle(w); hand[w]=0; rd[w]=OLD; want[w]=COMPL; ph[w]=ACK }
  :: atomic { ph[w]==SETTLE && n<K -> n++; settle(w) } /* committed, answer lost: sent again */
  :: atomic { ph[w]==ACK -> hold[w]=NONE; ph[w]=IDLE }      /* ack after the commit */
  /* --- rows in nobody's hand */
#ifndef NO_STRAY
#ifdef HAND_ID
  :: atomic { st==PROC && owner==me && hand[w]==0 && !OTHER(w) -> release() }
#else
  :: atomic { st==PROC && owner==me && !INHAND -> release() }
#endif
#endif
  /* --- crash at every point; a CLAIM on its way may still commit under the dead name */
  :: atomic { n<K && (ph[w]!=IDLE || owner==me) -> n++; giveback(w);
       if :: ph[w]==CLAIM && fly==0 -> fly=GONE :: fly==me -> fly=GONE :: else fi;
       if :: owner==me -> owner=GONE :: else fi;
       hand[w]=0; rb[w]=0; rd[w]=OLD; want[w]=COMPL; ph[w]=IDLE; ev=EV_ONCE;
#ifdef SLOTS
       giveback(3-w); hand[3-w]=0; rb[3-w]=0; rd[3-w]=OLD; want[3-w]=COMPL; ph[3-w]=IDLE
#endif
       }
  od
}

/* PUBLISH (returns the dispatch), publish, PubAck, MARK. A crash anywhere, or a PubAck that never comes. */
active [NR] proctype Relay() {
#define r (_pid-NW)
  do
  :: atomic { rel[r]==NONE && np -> rel[r]=CUR }
  :: atomic { rel[r]==OLD && !sent[r] -> old++; sent[r]=1 }
  :: atomic { rel[r]==CUR && !sent[r] -> sent[r]=1; if :: !pubd -> cur++; pubd=1 :: else fi }
  :: atomic { sent[r] -> if :: st==QUEUED && np && (rel[r]==CUR || MARK_BLIND) -> np=0 :: else fi; rel[r]=NONE; sent[r]=0 }
  :: atomic { rel[r]!=NONE && n<K -> n++; rel[r]=NONE; sent[r]=0 }
  od
}

/* RESET: remember (token), later one statement with the token and the predicate again. */
active [NR] proctype Sweeper() {
#define s (_pid-NW-NR)
  do
  :: atomic { seen[s]==0 && st==PROC && (late || DEADOWNER) -> seen[s]=tok }
  :: atomic { seen[s]!=0 ->
       if :: st==PROC && ((tok==seen[s] && (late || DEADOWNER)) || RESET_BLIND) ->
          assert(late || !RENEWED);                         /* S5: never a row whose owner renews it */
          owner=0; late=0;
          if :: stl++;                                      /* counted */
                if :: creq -> st=CANC :: !creq && stl>=MAXS -> st=FAILED
                   :: !creq && stl<MAXS && stl==1 -> requeue() :: else -> st=SCHED fi
             :: att--;                                      /* uncounted */
                if :: creq && !RESET_IGNORES_CANCEL -> st=CANC :: else -> requeue() fi
          fi; check()
       :: else fi; seen[s]=0 }
  :: atomic { ev -> ev=0 }                                  /* EV_ONCE: looked, nothing there yet, never again */
  od
}

active proctype Sweeps() {
  do
  :: atomic { st==SCHED -> requeue(); check() }                                     /* PROMOTE */
#ifndef NO_REPUB
  :: atomic { !rp && st==QUEUED && !np && !owe && GONE_MSG -> rp=1 }                /* proven gone ... */
  :: atomic { rp -> if :: st==QUEUED && !np -> requeue(); check() :: else fi; rp=0 }  /* REPUBLISH */
#endif
  :: atomic { owe -> owe=0; cur++; pubd=1 }                                         /* NO_OUTBOX only */
  :: atomic { owe && n<K -> n++; owe=0 }
  od }

active proctype Operator() {
  do
#ifdef CANCEL_TWO
  :: atomic { nx<MAXX && !cx -> cx=1;
       if :: st==QUEUED || st==SCHED -> st=CANC; np=0; cxl=1; check(); cx=0; nx++ :: else fi }
  :: atomic { cx -> cx=0; nx++;
       if :: st==PROC -> creq=1; cxl=1; check() :: else -> assert(FINAL) fi }       /* "already final" */
#else
  :: atomic { nx<MAXX -> nx++;
       if :: st==QUEUED || st==SCHED -> st=CANC; np=0; cxl=1; check()
          :: st==PROC -> creq=1; cxl=1; check()
          :: else -> assert(FINAL) fi }
#endif
  :: atomic { ny<MAXY && (st==FAILED || st==CANC) -> ny++; fin=PROC; cxl=0; att=0; err=0; stl=0; creq=0;
#ifdef RETRY_KEEPS_DISPATCH
       st=QUEUED; np=1;
#else
       requeue();
#endif
       check() }
  od }

active proctype World() {
  bool ok;
  do
#ifndef NO_LOSS
  :: atomic { n<K && cur>0 -> n++; cur-- }                                    /* broker loses */
#endif
  :: atomic { n<K -> n++; old++ }                                              /* or makes up */
#ifndef NO_LATE
  :: atomic { st==PROC && !late && !RENEWED -> late=1 }                             /* time passes */
  :: atomic { st==PROC && !late && RENEWED && n<K -> n++; late=1 }             /* false suspicion */
#endif
  :: atomic { fly!=0 -> claim(fly, ok); ok=0; fly=0 }           /* late commit */
  :: atomic { fly!=0 -> fly=0 }                                                     /* or never */
  :: atomic { n<K || nx<MAXX || ny<MAXY -> n=K; nx=MAXX; ny=MAXY }                  /* calm from now on: without
        this step an unused fault (a forged hint, a CANCEL) would still be open and rescue a lost job */
  od }

/* No step is left: the job must have ended and no message may be waiting. */
active proctype Quiet() {
#ifdef HANG
  end: timeout -> assert(FINAL || (st==PROC && !creq && hand[owner]==tok))
#else
  end: timeout -> assert(FINAL && cur==0 && old==0)
#endif
}
