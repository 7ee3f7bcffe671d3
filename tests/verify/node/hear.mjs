// Prints the first so many events that it hears.
import { connect } from 'nats';

const nats = await connect({ servers: process.env.NATS_URL });
const heard = [];
for await (const message of nats.subscribe(`${process.env.SUBJECT_PREFIX}.events.*.*`)) {
  heard.push({ subject: message.subject, event: message.json() });
  if (heard.length === Number(process.argv[2])) break;
}
console.log(JSON.stringify(heard));
await nats.close();
